"""What a test does with the shop under test, and what it sees of it in both servers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import psycopg2
import redis

from tests.processes import eventually

from .actors import NAMESPACE, SKU, broker, sell
from .signals import signals

if TYPE_CHECKING:
    from dramatiq import Actor, Message

    from tests.processes import WorkerProcess
    from tests.servers import Servers


class Shop:
    """Orders and stock in PostgreSQL, messages in Redis; looks at both with clients of its own."""

    def __init__(self, servers: Servers) -> None:
        self.servers = servers
        self.redis: Any = redis.Redis.from_url(servers.redis.url)
        self.pieces = 1_000
        self.sql("INSERT INTO stock VALUES (%s, %s)", SKU, self.pieces)

    def send(self, label: str, *, actor: Actor[[str], None] = sell, **options: Any) -> Message[None]:
        """Send a message of an actor under test; the options are Dramatiq's."""
        return actor.send_with_options(args=(label,), **options)

    def deliver(self, message: Message[None], times: int = 1) -> None:
        """Let a message come again, under another id in Redis."""
        for _ in range(times):
            broker.enqueue(message)

    def hold(self, point: str, label: str) -> None:
        signals.set(f"hold-{point}-{label}")

    def release(self, point: str, label: str) -> None:
        signals.clear(f"hold-{point}-{label}")

    def reached(self, point: str, label: str) -> list[list[str]]:
        """Who came to a point: [process, thread, note] of each."""
        return [line.split() for line in signals.notes(f"{point}-{label}")]

    def runs(self, label: str) -> int:
        """How often a body began."""
        return len(self.reached("body", label))

    def retries(self, label: str) -> list[int]:
        """The number of retries that each delivery of the message carried."""
        return [int(note) for _, _, note in self.reached("begin", label)]

    def hang_up(self, whom: str = "backend_type = 'client backend'") -> None:
        """Let PostgreSQL cut connections, and wait until that is done."""
        others = f"FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND {whom}"
        assert self.sql(f"SELECT count(pg_terminate_backend(pid)) {others}")
        eventually(lambda: self.sql(f"SELECT count(*) {others}") == 0)

    def expect_goes_on(self, worker: WorkerProcess) -> None:
        """I8: the only thread of a worker takes the next message with a clean connection."""
        self.send("next", max_retries=0)
        eventually(lambda: self.owed() == 0, what=worker.output)
        assert self.orders("next") == 1
        assert self.runs("next") == 1
        assert self.open_transactions() == 0

    def open_transactions(self) -> int:
        return int(self.sql("SELECT count(*) FROM pg_stat_activity WHERE state LIKE 'idle in transaction%%'"))

    def waits_for_a_lock(self) -> bool:
        return bool(self.sql("SELECT count(*) FROM pg_locks WHERE NOT granted"))

    def sql(self, query: str, *parameters: Any) -> Any:
        """The first column of the first row of an answer, by a new connection in autocommit."""
        connection = psycopg2.connect(self.servers.postgres.url)
        connection.autocommit = True
        try:
            cursor = connection.cursor()
            cursor.execute(query, parameters)
            row = cursor.fetchone() if cursor.description else None
        finally:
            connection.close()
        return row and row[0]

    def orders(self, label: str) -> int:
        """How often a message took effect."""
        return int(self.sql("SELECT count(*) FROM orders WHERE customer = %s", label))

    def keys(self) -> int:
        return int(self.sql("SELECT count(*) FROM processed_messages"))

    def stock(self) -> int:
        return int(self.sql("SELECT quantity FROM stock WHERE sku = %s", SKU))

    def books(self) -> tuple[int, int, int, int]:
        """Messages with an effect, effects, keys and pieces taken: equal where all is exact."""
        labels = self.sql("SELECT count(DISTINCT customer) FROM orders")
        effects = self.sql("SELECT count(*) FROM orders")
        return int(labels), int(effects), self.keys(), self.pieces - self.stock()

    def waiting(self, queue: str = "default") -> int:
        """Messages that lie in Redis for whoever comes."""
        return int(self.redis.llen(f"{NAMESPACE}:{queue}"))

    def in_hand(self, queue: str = "default") -> dict[str, int]:
        """How many messages of a queue each worker has in hand, by the worker's id."""
        keys = self.redis.keys(f"{NAMESPACE}:__acks__.*.{queue}")
        return {key.decode().split(".")[1]: int(self.redis.scard(key)) for key in keys}

    def beats(self) -> dict[str, float]:
        """The time of each worker's last sign of life, in milliseconds."""
        pairs = self.redis.zrange(f"{NAMESPACE}:__heartbeats__", 0, -1, withscores=True)
        return {worker.decode(): time_ms for worker, time_ms in pairs}

    def owed(self) -> int:
        """Messages that have not found their end: waiting, delayed or in hand."""
        queues = ("default", "default.DQ", "elsewhere", "elsewhere.DQ")
        return sum(self.redis.hlen(f"{NAMESPACE}:{queue}.msgs") for queue in queues)

    def dead(self) -> list[bytes]:
        """The dead letters, encoded."""
        assert self.redis.zcard(f"{NAMESPACE}:default.XQ") == self.redis.hlen(f"{NAMESPACE}:default.XQ.msgs")
        return list(self.redis.hvals(f"{NAMESPACE}:default.XQ.msgs"))

    def place(self, *encoded: bytes) -> None:
        """Put encoded messages into the queue, all at one moment."""
        with self.redis.pipeline(transaction=True) as pipeline:
            for number, message in enumerate(encoded):
                pipeline.hset(f"{NAMESPACE}:default.msgs", f"placed-{number}", message)
                pipeline.rpush(f"{NAMESPACE}:default", f"placed-{number}")
            pipeline.execute()
