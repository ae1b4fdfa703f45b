"""A stage whose broker has a ledger: what is owed and what is dead is seen as rows."""

from __future__ import annotations

from contextlib import contextmanager
from threading import Event, Thread
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from dramatiq import Message

from middleware import schema, tables
from middleware.relay import Relay

from .processes import eventually
from .stage import NAMESPACE, Stage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import peewee

    from .servers import Servers


class Row(NamedTuple):
    """A row of the ledger: what is owed."""

    message_id: str
    actor_name: str
    queue_name: str
    attempt: int
    due_in_s: float
    published: bool
    refused: str | None
    message: Message[Any]

    def is_still(self, other: Row) -> bool:
        """Whether two looks at a row saw no difference but the time that had passed."""
        return self._replace(due_in_s=0) == other._replace(due_in_s=0)


class Dead(NamedTuple):
    """A dead letter."""

    message_id: str | None
    actor_name: str | None
    reason: str
    error_class: str | None
    attempts: int
    message: bytes


class LedgerStage(Stage):
    """A stage with a ledger in the same schema; the arguments are those of `Stage`."""

    def __init__(self, servers: Servers, *, broker: dict[str, Any] | None = None, **arguments: Any) -> None:
        super().__init__(servers, broker={"ledger": self.models(), **(broker or {})}, **arguments)

    def models(self) -> Iterator[type[peewee.Model]]:
        """The tables of a ledger, as a foreign application makes them concrete."""

        yield from tables.on(self.database)  # not before a broker asks: there is no database yet

    def _make_inbox(self) -> None:
        schema.migrate(self.broker)
        self.database.close()

    @contextmanager
    def relay(self, *, asks: bool = True) -> Iterator[Relay]:
        """A relay in a thread of this process; unless it `asks`, only a wake-up lets it move."""
        assert self.broker.ledger is not None
        relay, over = Relay(self.broker, self.broker.ledger), Event()

        def obey() -> None:
            while not over.is_set():
                if self.redis.brpop([f"{NAMESPACE}:__wake__"], timeout=1):
                    relay.publish()
            self.database.close()

        thread = Thread(target=relay.run if asks else obey, args=(over,) if asks else (), daemon=True)
        thread.start()
        try:
            yield relay
        finally:
            over.set()
            self.broker.wake()
            thread.join()

    @contextmanager
    def worker_and_relay(self, threads: int = 2, **arguments: Any) -> Iterator[Any]:
        """A worker, and a relay that does not let it wait."""
        with self.relay(), self.worker(threads, **arguments) as worker:
            yield worker

    def send(self, message: Message[Any], **arguments: Any) -> Message[Any]:
        """Send a message in a transaction of its own, hence through the ledger."""
        with self.database.atomic():
            return self.broker.enqueue(message, **arguments)

    # What can be seen from outside

    def rows(self) -> list[Row]:
        """What is owed, the longest due first."""
        found = self.sql(
            "SELECT message_id, actor_name, queue_name, attempt, "
            "extract(epoch FROM due_at - clock_timestamp())::float, published_at IS NOT NULL, refused, "
            "message FROM outbox_messages ORDER BY due_at, message_id"
        )
        return [Row._make((*row[:-1], Message.decode(bytes(row[-1])))) for row in found]

    def row(self) -> Row:
        """The one thing that is owed."""
        (row,) = self.rows()
        return row

    def owed(self) -> list[str]:
        """The ids of the messages that are owed, in order."""
        return sorted(row.message_id for row in self.rows())

    def letters(self) -> list[Dead]:
        """The dead letters, in the order in which they died."""
        found = self.sql(
            "SELECT message_id, actor_name, reason, error_class, attempts, message "
            "FROM dead_letters ORDER BY id"
        )
        return [Dead._make((*row[:-1], bytes(row[-1]))) for row in found]

    def letter(self) -> Dead:
        """The one dead letter."""
        (letter,) = self.letters()
        return letter

    def done(self) -> list[str]:
        """The second halves of all keys that were committed."""
        return [key for (key,) in self.sql("SELECT message_id FROM processed_messages ORDER BY 1")]

    def in_redis(self) -> list[str]:
        """The ids of all messages in Redis, whatever their queue."""
        client: Any = self.redis
        names = [name for name in client.keys(f"{NAMESPACE}:*.msgs") if not name.endswith(b".XQ.msgs")]
        return sorted(Message.decode(raw).message_id for name in names for raw in client.hvals(name))

    def expect_settled(self, deadline_s: float = 15) -> None:
        """Wait until nothing is owed, and Redis has nothing either."""
        eventually(
            lambda: not self.rows() and not self.in_redis(),
            deadline_s,
            what=lambda: (self.rows(), self.in_redis(), self.letters()),
        )


@pytest.fixture
def ledger_with(clean: Servers) -> Iterator[Callable[..., LedgerStage]]:
    """Sets a stage with the arguments of `LedgerStage`."""
    stages: list[LedgerStage] = []

    def make(**arguments: Any) -> LedgerStage:
        stages.append(LedgerStage(clean, **arguments))
        return stages[-1]

    yield make
    clean.start()
    for stage in stages:
        stage.close()


@pytest.fixture
def ledger(ledger_with: Callable[..., LedgerStage]) -> LedgerStage:
    """A stage with a ledger and Dramatiq's default stack."""
    return ledger_with()
