"""What the ledger costs: how fast the relay is, how soon, and what an old snapshot does to it."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack, closing
from dataclasses import dataclass
from io import StringIO
from typing import TYPE_CHECKING

import psycopg2

from .drain import QUEUE, RUN_DEADLINE_S, Bench, Contender, message_of
from .workers import REPOSITORY, cpu_s, relay, workers

if TYPE_CHECKING:
    from pathlib import Path

    import psutil

#: Rows that the relay has to publish, all of them at once.
ROWS = 50_000
#: Messages that pass through the ledger beside an old snapshot, and how many are owed at a time.
PASSING, OWED = 50_000, 2_000
#: Commits that are timed.
COMMITS = 200
#: For how long an idle relay is watched, in seconds.
IDLE_S = 6

#: The messages that pass last: by then the ledger has had nearly all of them.
LAST = (0.8, 0.98)


@dataclass(frozen=True)
class Passed:
    """Messages that went from row to Redis to worker.

    rate, last_rate: messages per second of all and of the last fifth. commit_ms: the median from
    commit to Redis afterwards.
    """

    rate: float
    last_rate: float
    commit_ms: float


@dataclass(frozen=True)
class Figures:
    """What was measured of the ledger.

    rows_per_s: what one relay publishes. commit_ms: medians from commit to Redis. idle: the share
    of a core that a relay takes that has nothing to do.
    """

    rows_per_s: float
    commit_ms: float
    idle: float
    alone: Passed
    beside_snapshot: Passed


class LedgerBench:
    """Measures the ledger on the servers of a bench.

    Arguments:
      bench: nothing else may run on it.
      contender: whose actor gets the messages.
    """

    def __init__(self, bench: Bench, contender: Contender) -> None:
        self.bench = bench
        self.contender = contender

    def figures(self) -> Figures:
        """Measure everything once."""
        rows_per_s = self._rows_per_s()
        self.bench.prepare(self.contender)
        with relay(self.bench.environment, self._log("relay")) as process:
            commit_ms, idle = self._commit_ms(), self._idle(process)
        alone = self._pass(old_snapshot=False)
        return Figures(rows_per_s, commit_ms, idle, alone, self._pass(old_snapshot=True))

    def _log(self, name: str) -> Path:
        return self.bench.folder / f"{name}.log"

    def _rows_per_s(self) -> float:
        self.bench.prepare(self.contender)
        self._owe(0, ROWS)
        unlimited = {**self.bench.environment, "REDIS_WINDOW": str(2 * ROWS)}
        with relay(unlimited, self._log("relay")):
            deadline = time.monotonic() + RUN_DEADLINE_S
            while self.bench.redis.hlen(f"{QUEUE}.msgs") < ROWS:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"The relay printed:\n{self._log('relay').read_text()[-4_000:]}")
                time.sleep(0.02)
        return float(
            self.bench.value(
                "SELECT count(*) / extract(epoch FROM max(published_at) - min(published_at))"
                " FROM outbox_messages WHERE published_at > (SELECT min(published_at) FROM outbox_messages)"
            )
        )

    def _commit_ms(self) -> float:
        command = [sys.executable, "-m", "benchmarks.commits", str(COMMITS)]
        done = subprocess.run(
            command, cwd=REPOSITORY, env=self.bench.environment, check=True, stdout=subprocess.PIPE
        )
        return float(statistics.median(json.loads(done.stdout)))

    def _idle(self, process: psutil.Process) -> float:
        began_s = cpu_s(process)
        time.sleep(IDLE_S)
        return (cpu_s(process) - began_s) / IDLE_S

    def _pass(self, *, old_snapshot: bool) -> Passed:
        """Let messages pass, with as many owed at a time as a busy application has."""
        self.bench.prepare(self.contender)
        environment = self.bench.environment
        with ExitStack() as stack:
            if old_snapshot:
                self._hold_a_snapshot(stack)
            stack.enter_context(relay(environment, self._log("relay")))
            with workers(self.contender.module, environment, self._log("passing")) as master:
                self._send(master)
            self.bench.check(self.contender, PASSING)
            commit_ms = self._commit_ms()
        return Passed(self.bench.rate(self.contender), self.bench.rate(self.contender, LAST), commit_ms)

    def _hold_a_snapshot(self, stack: ExitStack) -> None:
        connection = stack.enter_context(closing(psycopg2.connect(self.bench.database_url)))
        connection.set_session(isolation_level="REPEATABLE READ", readonly=True)
        with connection.cursor() as cursor:
            cursor.execute("SELECT count(*) FROM outbox_messages")

    def _send(self, master: psutil.Popen) -> None:
        sent, deadline = 0, time.monotonic() + RUN_DEADLINE_S
        while (done := self.bench.keys(self.contender)) < PASSING or self.bench.redis.hlen(f"{QUEUE}.msgs"):
            if master.poll() is not None or time.monotonic() > deadline:
                printed = self._log("passing").read_text()[-4_000:]
                raise TimeoutError(f"The workers did not finish. They printed:\n{printed}")
            if count := min(OWED - (sent - done), PASSING - sent):
                self._owe(sent, count)
                sent += count
            time.sleep(0.1)  # counting the keys more often would be felt

    def _owe(self, first: int, count: int) -> None:
        """Write rows as senders do, many in one statement."""
        lines = StringIO()
        for number in range(first, first + count):
            message = message_of(self.contender, number)
            lines.write(
                f"{message.message_id}\t{message.actor_name}\tdefault\t\\\\x{message.encode().hex()}\n"
            )
        lines.seek(0)
        columns = "(message_id, actor_name, queue_name, message)"
        with self.bench.connection.cursor() as cursor:
            cursor.copy_expert(f"COPY outbox_messages {columns} FROM STDIN", lines)
