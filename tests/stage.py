"""A stage for deliveries: broker, database and worker in this process, on the session's servers.

What a test asserts is seen from outside: by SQL on a connection of its own, and in Redis by
Dramatiq's layout of keys.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote

import dramatiq
import psycopg2
import pytest
import redis
from dramatiq import Actor, Message
from dramatiq.middleware import (
    AgeLimit,
    Callbacks,
    Middleware,
    Pipelines,
    Retries,
    ShutdownNotifications,
    TimeLimit,
)
from dramatiq.results import Results
from dramatiq.results.backends import RedisBackend

from middleware import Database, DurableRedisBroker, IdempotentConsumer, tables

from .processes import eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from .servers import Servers

SCHEMA = "stage"
NAMESPACE = "stage"

#: Short enough to be waited for, long enough for a busy machine.
LOCK_TIMEOUT_MS = 300
#: A retry that shall be seen waiting, and one that shall be seen running.
LATER_MS, SOON_MS = 60_000, 20


class Seen(NamedTuple):
    """What a hook of Dramatiq's saw of a delivery."""

    hook: str
    message_id: str
    outcome: Any = None


class Witness(Middleware):
    """Writes down what the hooks are told, in order."""

    def __init__(self) -> None:
        self.seen: list[Seen] = []

    def after_process_message(
        self, broker: Any, message: Any, *, result: Any = None, exception: Any = None
    ) -> None:
        outcome = result if exception is None else exception
        self.seen.append(Seen("returned" if exception is None else "raised", message.message_id, outcome))

    def after_skip_message(self, broker: Any, message: Any) -> None:
        self.seen.append(Seen("skipped", message.message_id))


class Stage:
    """A broker with a table of keys and a table of effects, both in a schema of their own.

    Arguments:
      servers: the session's servers.
      user: as whom the workers connect.
      address: how they get to PostgreSQL, if not directly.
      middleware: what stands in the stack before IdempotentConsumer; None: Dramatiq's own.
      session: parameters of the PostgreSQL session, such as ``deadlock_timeout``.
      database: further arguments of `Database`.
      broker: further arguments of `DurableRedisBroker`.
    """

    def __init__(
        self,
        servers: Servers,
        *,
        user: str = "postgres",
        address: str | None = None,
        middleware: list[Middleware] | None = None,
        session: dict[str, str] | None = None,
        database: dict[str, Any] | None = None,
        broker: dict[str, Any] | None = None,
    ) -> None:
        self.servers = servers
        self.redis = redis.Redis.from_url(servers.redis.url)
        self._connection: Any = None
        self.database = Database(
            self.url(user, address, **(session or {})),
            **{"lock_timeout_ms": LOCK_TIMEOUT_MS, **(database or {})},
        )
        self.inbox = inbox_on(self.database)
        self.broker = DurableRedisBroker(
            url=servers.redis.url,
            namespace=NAMESPACE,
            middleware=default_stack() if middleware is None else middleware,
            **(broker or {}),
        )
        self.witness = Witness()
        self.broker.add_middleware(IdempotentConsumer(self.inbox))
        self.broker.add_middleware(self.witness)
        self.sql(f"DROP SCHEMA IF EXISTS {SCHEMA} CASCADE")
        self.sql(f"CREATE SCHEMA {SCHEMA}")
        self.sql("CREATE TABLE effects (label text)")
        self._make_inbox()
        self.sql(f"GRANT ALL ON SCHEMA {SCHEMA} TO PUBLIC")
        self.sql(f"GRANT ALL ON ALL TABLES IN SCHEMA {SCHEMA} TO PUBLIC")

    def _make_inbox(self) -> None:
        database = Database(self.url())
        database.create_tables([inbox_on(database)])
        database.close()

    def url(self, user: str = "postgres", address: str | None = None, **session: str) -> str:
        """How to get to the database, with parameters of the session."""
        parameters = {"search_path": SCHEMA, **session}
        options = " ".join(f"-c {name}={value}" for name, value in parameters.items())
        url = (address or self.servers.postgres.url).replace("//postgres@", f"//{user}@")
        return f"{url}&options={quote(options)}"

    # What a test puts on the stage

    def actor(self, **options: Any) -> Callable[[Callable[..., Any]], Actor[..., Any]]:
        """Declare an actor whose retries shall be seen waiting."""
        options = {"min_backoff": LATER_MS, "max_backoff": LATER_MS, **options}
        declare: Any = dramatiq.actor(broker=self.broker, **options)
        return declare  # type: ignore[no-any-return] # its overloads are narrower

    def effect(self, label: str) -> None:
        """The business change of a body."""
        self.database.execute_sql("INSERT INTO effects VALUES (%s)", (label,))

    def keep_results(self) -> RedisBackend:
        """Append Dramatiq's Results, as an application does after it got its broker."""
        backend = RedisBackend(client=self.redis)
        self.broker.add_middleware(Results(backend=backend))
        return backend

    @contextmanager
    def worker(self, threads: int = 2, *, time_limits: bool = False) -> Iterator[dramatiq.Worker]:
        """A worker of this process, stopped at the end."""
        if time_limits:  # the command line does this
            self.broker.emit_after("process_boot")
        worker = dramatiq.Worker(self.broker, worker_timeout=50, worker_threads=threads)
        worker.start()
        try:
            yield worker
        finally:
            worker.stop()

    @contextmanager
    def rival(self) -> Iterator[Any]:
        """The cursor of another session, in a transaction that is rolled back at the end."""
        connection: Any = psycopg2.connect(self.url())
        try:
            with connection.cursor() as cursor:
                yield cursor
        finally:
            connection.close()

    # What can be seen from outside

    def sql(self, text: str, *parameters: Any) -> list[tuple[Any, ...]]:
        """Run a statement on a connection of the test's own; in autocommit."""
        if self._connection is None or self._connection.closed:
            self._connection = psycopg2.connect(self.url())
            self._connection.autocommit = True
        with self._connection.cursor() as cursor:
            cursor.execute(text, parameters or None)
            return list(cursor.fetchall()) if cursor.description else []

    def hang_up(self) -> None:
        """Close the test's own connection; the next statement opens another."""
        if self._connection is not None:
            self._connection.close()

    def effects(self) -> list[str]:
        """The labels of all effects that were committed, in order of name."""
        return [label for (label,) in self.sql("SELECT label FROM effects ORDER BY label")]

    def key_rows(self) -> list[tuple[str, str]]:
        """The keys that were committed."""
        rows = self.sql("SELECT consumer_name, message_id FROM processed_messages ORDER BY 1, 2")
        return [(consumer_name, message_id) for consumer_name, message_id in rows]

    def stored(self) -> tuple[list[str], list[tuple[str, str]]]:
        """The effects and the keys that were committed."""
        return self.effects(), self.key_rows()

    def results(self) -> list[Any]:
        """The results that stand beside the keys."""
        return [row for (row,) in self.sql("SELECT result FROM processed_messages ORDER BY processed_at")]

    def seen(self, hook: str) -> list[Seen]:
        """What the hooks saw of one kind."""
        return [seen for seen in self.witness.seen if seen.hook == hook]

    def raw(self, place: str, queue: str = "default") -> dict[str, bytes]:
        """The messages in one place, as they are encoded, by their ids in Redis.

        Places: waiting and in_hand; delayed, which is the delay queue and what a worker holds of
        it; dead.
        """
        name = queue + (".DQ" if place == "delayed" else "")
        hand = f"{NAMESPACE}:__acks__.{self.broker.broker_id}.{name}"
        with self.redis.pipeline(transaction=True) as pipe:
            pipe.lrange(f"{NAMESPACE}:{name}", 0, -1)
            pipe.smembers(hand)
            pipe.hgetall(f"{NAMESPACE}:{name}.msgs")
            pipe.zrange(f"{NAMESPACE}:{queue}.XQ", 0, -1)
            pipe.hgetall(f"{NAMESPACE}:{queue}.XQ.msgs")
            listed, held, messages, dead, dead_messages = pipe.execute()
        assert set(messages) == set(listed) | set(held), "an id without its message, or the reverse"
        assert set(dead_messages) == set(dead)
        if place == "dead":
            return {key.decode(): dead_messages[key] for key in dead}
        ids = {"waiting": listed, "in_hand": sorted(held), "delayed": [*listed, *sorted(held)]}[place]
        return {key.decode(): messages[key] for key in ids}

    def messages(self, place: str, queue: str = "default") -> list[Message[Any]]:
        """The messages in one place."""
        return [Message.decode(raw) for raw in self.raw(place, queue).values()]

    def only(self, place: str) -> Message[Any]:
        """The one message in a place."""
        (message,) = self.messages(place)
        return message

    def places(self, queue: str = "default") -> dict[str, list[str]]:
        """Where messages of the queue are: their ids by place, places without any left out."""
        found = {
            place: sorted(message.message_id for message in self.messages(place, queue))
            for place in ("waiting", "in_hand", "delayed", "dead")
        }
        return {place: ids for place, ids in found.items() if ids}

    def expect_in_redis(self, queue: str = "default", **places: list[Message[Any]]) -> None:
        """Wait until Redis holds these messages in these places and no other."""
        wanted = {place: sorted(one.message_id for one in found) for place, found in places.items()}
        eventually(lambda: self.places(queue) == wanted, 15, what=lambda: (self.places(queue), wanted))

    def close(self) -> None:
        """Leave nothing behind."""
        self.database.close()
        self.sql(f"DROP SCHEMA IF EXISTS {SCHEMA} CASCADE")
        self.hang_up()
        self.redis.close()
        self.broker.client.close()


def inbox_on(database: Database) -> type[tables.ProcessedMessage]:
    """A table of keys on a database, as a foreign application makes it concrete."""

    class ProcessedMessage(tables.ProcessedMessage):
        class Meta:
            pass

    ProcessedMessage.bind(database)
    return ProcessedMessage


def default_stack() -> list[Middleware]:
    """Dramatiq's default stack, with a time limit that looks often."""
    return [AgeLimit(), TimeLimit(interval=20), ShutdownNotifications(), Callbacks(), Pipelines(), Retries()]


@pytest.fixture
def stage_with(clean: Servers) -> Iterator[Callable[..., Stage]]:
    """Sets a stage with the arguments of `Stage`."""
    stages: list[Stage] = []

    def make(**arguments: Any) -> Stage:
        stages.append(Stage(clean, **arguments))
        return stages[-1]

    yield make
    clean.start()
    for stage in stages:
        stage.close()


@pytest.fixture
def stage(stage_with: Callable[..., Stage]) -> Stage:
    """A stage with Dramatiq's default stack."""
    return stage_with()
