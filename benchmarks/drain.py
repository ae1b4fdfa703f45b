"""One run: fill a queue, start workers, and measure how fast they drain it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import dramatiq
import psutil
import psycopg2
import redis

from .workers import REPOSITORY, cpu_s, workers

if TYPE_CHECKING:
    from pathlib import Path

#: So many articles that eight threads seldom meet on the row of one.
ARTICLES = 1_000
START_QUANTITY = 1_000_000
NAMESPACE = "benchmark"
QUEUE = f"{NAMESPACE}:default"

#: The window that is measured, as shares of the messages: booting and running dry do not count.
WINDOW = (0.25, 0.95)
CORES = psutil.cpu_count() or 1
#: How long a run may take before it is given up, in seconds.
RUN_DEADLINE_S = 120


@dataclass(frozen=True)
class Contender:
    """One way to do the work.

    name: for the reader. module: what `dramatiq` is started with. actor: which of its actors gets
    the messages. key_table: the table with one row for each message done, with processed_at.
    key_columns: what that table is made of where no migration makes it.
    """

    name: str
    module: str
    actor: str
    key_table: str
    key_columns: str = ""


@dataclass(frozen=True)
class Run:
    """What was measured: messages per second, and CPU microseconds per message of each part.

    elsewhere: the share of the machine's CPU that went to anything else meanwhile, 0 to 1.
    """

    rate: float
    workers_us: float
    postgresql_us: float
    valkey_us: float
    elsewhere: float

    @property
    def cpu_us(self) -> float:
        """The CPU time of all parts, in microseconds per message."""
        return self.workers_us + self.postgresql_us + self.valkey_us


class InexactError(Exception):
    """A run did not do each message once; the text says what was found."""


def message_of(contender: Contender, number: int, **options: str) -> dramatiq.Message[None]:
    """The message that takes one piece of an article, another one each time."""
    return dramatiq.Message(
        queue_name="default",
        actor_name=contender.actor,
        args=(f"SKU-{number % ARTICLES + 1}", str(uuid4())),
        kwargs={},
        options=options,
    )


class Bench:
    """Two servers that stand still, to run contenders on one after the other.

    Arguments:
      database_url, redis_url: the servers; both must run on this machine, for their CPU time.
      folder: takes the logs of the workers.
    """

    def __init__(self, database_url: str, redis_url: str, folder: Path) -> None:
        self.folder = folder
        self.database_url = database_url
        self.environment = {
            **os.environ,
            "DATABASE_URL": database_url,
            "REDIS_URL": redis_url,
            "REDIS_NAMESPACE": NAMESPACE,
            "ONETAKE_ENV_FILE": "",
        }
        self.redis = redis.Redis.from_url(redis_url, decode_responses=True)
        self.connection = psycopg2.connect(database_url)
        self.connection.autocommit = True
        self.valkey = psutil.Process(self.redis.info("server")["process_id"])
        self.postgresql = psutil.Process(self.connection.info.backend_pid).parents()[0]
        for setting in ("fsync", "synchronous_commit"):
            if self.value(f"SHOW {setting}") != "on":
                raise RuntimeError(f"{setting} is off: what is not durable is not worth measuring.")

    def close(self) -> None:
        """Close the two connections."""
        self.connection.close()
        self.redis.close()

    def migrate(self) -> None:
        """Make Onetake's tables."""
        command = [sys.executable, "-c", "import models; models.migrate()"]
        subprocess.run(command, cwd=REPOSITORY, env=self.environment, check=True)

    def drain(self, contender: Contender, messages: int) -> Run:
        """Let a contender perform a number of messages on fresh tables.

        The rate is computed afterwards from the times in the key rows, so measuring costs nothing
        while it runs; the CPU times are read once at each end of the window.

        Raises:
          InexactError: afterwards a message is missing, doubled, or left over.
          TimeoutError: the workers did not finish within `RUN_DEADLINE_S`.
        """
        self.prepare(contender)
        self._enqueue(contender, messages)
        log = self.folder / f"{contender.actor}.log"
        with workers(contender.module, self.environment, log) as master:
            marks = []
            for share in WINDOW:
                self._wait_until_left(messages - int(messages * share), master, log)
                marks.append(self._spent(contender, master))
            self._wait_until_left(0, master, log)
        self.check(contender, messages)
        wall_s, busy_s, keys, *parts_s = (end - start for start, end in zip(*marks, strict=True))
        elsewhere = max(0.0, busy_s - sum(parts_s)) / (wall_s * CORES)
        workers_us, postgresql_us, valkey_us = (part_s / keys * 1e6 for part_s in parts_s)
        return Run(self.rate(contender), workers_us, postgresql_us, valkey_us, elsewhere)

    def prepare(self, contender: Contender) -> None:
        """Empty Redis and the tables, and fill the stock."""
        self.redis.flushdb()
        if contender.key_columns:
            self.execute(f"CREATE TABLE IF NOT EXISTS {contender.key_table} ({contender.key_columns})")
        self.execute(f"TRUNCATE stock, orders, outbox_messages, {contender.key_table}")
        self.execute(
            "INSERT INTO stock SELECT 'SKU-' || number, %s FROM generate_series(1, %s) AS number",
            *(START_QUANTITY, ARTICLES),
        )
        self.execute("VACUUM ANALYZE stock")
        self.execute("CHECKPOINT")

    def _enqueue(self, contender: Contender, messages: int) -> None:
        """Write the messages as Dramatiq's broker does, many in one exchange."""
        with self.redis.pipeline(transaction=False) as pipeline:
            for number in range(messages):
                redis_id = str(uuid4())
                message = message_of(contender, number, redis_message_id=redis_id)
                pipeline.hset(f"{QUEUE}.msgs", redis_id, message.encode())
                pipeline.rpush(QUEUE, redis_id)
            pipeline.execute()

    def _wait_until_left(self, left: int, master: psutil.Popen, log: Path) -> None:
        deadline = time.monotonic() + RUN_DEADLINE_S
        while self.redis.hlen(f"{QUEUE}.msgs") > left:
            if master.poll() is not None or time.monotonic() > deadline:
                printed = log.read_text()[-4_000:]
                raise TimeoutError(f"The workers did not finish. They printed:\n{printed}")
            time.sleep(0.02)  # one HLEN each 20 ms is nothing beside the work

    def _spent(self, contender: Contender, master: psutil.Process) -> tuple[float, ...]:
        """The time, the machine's busy seconds, messages done, and each part's CPU seconds."""
        machine = psutil.cpu_times()
        busy_s = machine.user + machine.nice + machine.system
        parts_s = (cpu_s(master), cpu_s(self.postgresql), cpu_s(self.valkey))
        return time.monotonic(), busy_s, self.keys(contender), *parts_s

    def keys(self, contender: Contender) -> int:
        """How many messages are done."""
        return int(self.value(f"SELECT count(*) FROM {contender.key_table}"))

    def check(self, contender: Contender, messages: int) -> None:
        """Every message was done once, and nothing is left.

        Raises:
          InexactError: says what was found instead.
        """
        keys = self.keys(contender)
        taken = self.value("SELECT %s - sum(quantity) FROM stock", ARTICLES * START_QUANTITY)
        wrong_articles = self.value(
            "SELECT count(*) FROM stock WHERE %s - quantity <> (%s + %s - substr(sku, 5)::integer) / %s",
            *(START_QUANTITY, messages, ARTICLES, ARTICLES),
        )
        left_over = [*self.redis.keys(f"{QUEUE}*")]
        if owed := self.value("SELECT count(*) FROM outbox_messages"):
            left_over.append(f"{owed} rows of the ledger")
        if keys != messages or taken != messages or wrong_articles or left_over:
            raise InexactError(
                f"{contender.name} was sent {messages} messages; afterwards there are {keys} keys "
                f"and {taken} decrements, {wrong_articles} articles have a wrong quantity, and "
                f"left over is {left_over or 'nothing'}."
            )

    def rate(self, contender: Contender, window: tuple[float, float] = WINDOW) -> float:
        """Messages per second, by the times of the keys in a window: shares of all messages."""
        messages, seconds = self.execute(
            "SELECT max(place) - min(place), extract(epoch FROM max(moment) - min(moment))"
            " FROM (SELECT processed_at AS moment, row_number() OVER (ORDER BY processed_at) AS place,"
            f"             count(*) OVER () AS messages FROM {contender.key_table}) AS done"
            " WHERE place BETWEEN messages * %s AND messages * %s",
            *window,
        )[0]
        return float(messages / seconds)

    def execute(self, statement: str, *values: object) -> list[tuple[Any, ...]]:
        """The rows that a statement returns, in autocommit."""
        with self.connection.cursor() as cursor:
            cursor.execute(statement, values or None)
            return cursor.fetchall() if cursor.description else []

    def value(self, statement: str, *values: object) -> Any:
        """The first column of the first row."""
        return self.execute(statement, *values)[0][0]
