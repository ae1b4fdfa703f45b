"""Two workers and a relay that live across the steps of the property test, and what is seen of them."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import closing, contextmanager
from signal import SIGCONT, SIGSTOP
from typing import TYPE_CHECKING, Any, Literal

import psycopg2
import redis
from dramatiq import Message

from .processes import Kind, WorkerProcess
from .property_actors import NAMESPACE, SKU, broker
from .servers import PROJECT, Servers

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MODULE = "tests.property_actors"
KINDS: tuple[Kind, ...] = ("threads", "gevent")
PIECES = 1_000_000

#: What Redis can lose.
Loss = Literal["everything", "its lists", "its messages"]


class World:
    """A worker of threads, a worker of greenlets and a relay; each is killed and started again.

    Arguments:
      servers: without a row or a key.
      folder: takes the logs.
    """

    def __init__(self, servers: Servers, folder: Path) -> None:
        self.servers = servers
        self.folder = folder
        self.redis = redis.Redis.from_url(servers.redis.url)
        self.sql("INSERT INTO stock VALUES (%s, %s)", SKU, PIECES)
        self.workers = {kind: self._start(kind) for kind in KINDS}
        self.relay = self._start_relay()
        for worker in self.workers.values():
            worker.ready()

    def _start(self, kind: Kind) -> WorkerProcess:
        return WorkerProcess(self.folder / f"{kind}.log", kind=kind, module=MODULE, threads=2)

    def _start_relay(self) -> subprocess.Popen[bytes]:
        with (self.folder / "relay.log").open("wb") as output:
            command = [sys.executable, "-m", "middleware", "relay", "--broker", MODULE]
            return subprocess.Popen(command, cwd=PROJECT, env=os.environ, stdout=output, stderr=output)

    # What happens to it

    def kill_worker(self, kind: Kind) -> None:
        """End a worker as the machine's failure would; another one comes as soon as it can."""
        self.workers[kind].kill()
        self.workers[kind] = self._start(kind)

    def kill_relay(self) -> None:
        """The same for the relay."""
        self.relay.kill()
        self.relay.wait()
        self.relay = self._start_relay()

    @contextmanager
    def workers_stand_still(self) -> Iterator[None]:
        """Stop both workers, as a busy machine would, and let them go on at the end."""
        for worker in self.workers.values():
            worker.signal(SIGSTOP)
        try:
            yield
        finally:
            for worker in self.workers.values():
                worker.signal(SIGCONT)

    def lose(self, what: Loss) -> None:
        """Let Redis lose something, at one moment."""
        if what == "everything":
            self.redis.flushall()
            return
        names = [f"{NAMESPACE}:{queue}" for queue in broker.get_declared_queues()]
        self.redis.delete(*(name + (".msgs" if what == "its messages" else "") for name in names))

    def close(self) -> None:
        """End all three."""
        for worker in self.workers.values():
            worker.kill()
        self.relay.kill()
        self.relay.wait()
        self.redis.close()

    # What is seen of it

    def sql(self, query: str, *parameters: Any) -> list[tuple[Any, ...]]:
        """The rows of an answer, by a new connection in autocommit."""
        with closing(psycopg2.connect(self.servers.postgres.url)) as connection:
            connection.autocommit = True
            with connection.cursor() as cursor:
                cursor.execute(query, parameters or None)
                return list(cursor.fetchall()) if cursor.description else []

    def effects(self) -> dict[str, int]:
        """How often each label took effect."""
        return dict(self.sql("SELECT customer, count(*) FROM orders GROUP BY customer"))

    def pieces_taken(self) -> int:
        return PIECES - int(self.sql("SELECT quantity FROM stock")[0][0])

    def known_to_postgresql(self) -> set[str]:
        """The labels of messages that are owed or done."""
        owed = self.sql("SELECT message FROM outbox_messages")
        return {Message.decode(bytes(raw)).args[0] for (raw,) in owed} | set(self.effects())

    def dead_letters(self) -> list[tuple[Any, ...]]:
        return self.sql("SELECT message_id, actor_name, reason, error_text FROM dead_letters")

    def is_at_rest(self) -> bool:
        """Whether no message waits; Redis is asked first, because its messages make new rows."""
        names: Any = self.redis.keys(f"{NAMESPACE}:*.msgs")
        return not names and self.sql("SELECT count(*) FROM outbox_messages") == [(0,)]

    def story(self) -> str:
        """What the processes printed last."""
        logs = sorted(self.folder.glob("*.log"))
        return "\n".join(f"{log.name}:\n{log.read_text(errors='replace')[-2_000:]}" for log in logs)
