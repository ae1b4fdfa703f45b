"""The relay: it publishes what is due, and finds out what Redis has lost.

Mark, commit, publish: no row is locked during a call to Redis (T38). What was marked and not
published, because a relay died in between or Redis came back empty, is found by the audit. Each
method does one round and returns a count; `run` repeats them.
"""

from __future__ import annotations

import logging
from time import monotonic
from typing import TYPE_CHECKING

import peewee
import psycopg2
import redis

if TYPE_CHECKING:
    from collections.abc import Iterator
    from threading import Event

    from .broker import DurableRedisBroker
    from .ledger import Ledger, Row

logger = logging.getLogger("onetake")

#: Rows of one round; their names fit into the buffer of a socket, so that a relay that is stopped
#: while it receives them holds no lock (T38).
BATCH = 300
#: A script's arguments count as memory of a full Redis (T33).
CHUNK_BYTES = 256 << 10
#: A wake-up comes at once where it can; this poll is the truth (T16).
POLL_S = 0.25
#: How often what is published is looked for in Redis, and how old it must be.
AUDIT_S, AUDIT_AGE_S = 3.0, 1.0
#: How long a relay waits for a server that is away.
AWAY_S = 0.5
#: How much later a row is tried again that Redis refused, in seconds.
LATER_S = 1.0
#: Ids in one question.
IDS = 1_000


class _RedisIsFull(Exception):
    """Redis has no memory for what it was given."""


class Relay:
    """What moves messages from the ledger to Redis; any number may run at once.

    Arguments:
      broker: with a ledger.
      overdue_s: leave those rows to others that have not been due for so long.
    """

    def __init__(self, broker: DurableRedisBroker, ledger: Ledger, *, overdue_s: float = 0.0) -> None:
        self.broker = broker
        self.ledger = ledger
        self.overdue_s = overdue_s
        self.batch = BATCH
        self._full: set[str] = set()
        self._audited_s = 0.0

    def run(self, stopping: Event) -> None:
        """Publish and audit until `stopping` is set; what was begun is finished."""
        while not stopping.is_set():
            try:
                count = self.publish()
                if monotonic() >= self._audited_s + AUDIT_S:
                    self.audit()
                    self._audited_s = monotonic()
                if not count:
                    self._rest(stopping)
            except redis.RedisError as error:
                self.broker.outage.begins(error)
                stopping.wait(AWAY_S)
            except (peewee.PeeweeException, psycopg2.Error) as error:
                self.broker.guard.outage.begins(error)
                self.ledger.database.discard()
                stopping.wait(AWAY_S)
        self.ledger.database.discard()

    def _rest(self, stopping: Event) -> None:
        """Until a sender says that something is due, or it is time to look; a worker only looks."""
        if self.overdue_s:
            stopping.wait(POLL_S)
        else:
            self.broker.client.brpop([f"{self.broker.namespace}:__wake__"], timeout=POLL_S)

    def publish(self) -> int:
        """Publish rows that are due; returns how many Redis took, 0 when there is nothing to do now."""
        self._full = {queue for queue in self._full if self.broker.is_full(queue)}
        rows = self.ledger.take_due(self.batch, self.overdue_s, sorted(self._full))
        self.broker.guard.outage.ends()
        left, chunk, count = list(rows), [], 0
        try:
            for chunk in _chunks(rows):
                count += self._push(self.ledger.with_messages(chunk))
                del left[: len(chunk)]
            self.broker.outage.ends()
        except _RedisIsFull:
            self.ledger.give_back(row.owed for row in left)
            self.batch = max(1, self.batch // 2)
            # What a connection has sent counts as memory, and might be what is missing (T33).
            self.broker.client.connection_pool.disconnect(inuse_connections=False)
            return 0
        except redis.RedisError:
            # Maybe it is the fault of one of these, so that what comes later has its turn first (T16).
            self.ledger.give_back((row.owed for row in chunk), later_s=LATER_S)
            self.ledger.give_back(row.owed for row in left[len(chunk) :])
            self.batch = max(1, self.batch // 2)
            raise
        self.batch = min(BATCH, 2 * self.batch)
        return count

    def _push(self, rows: list[Row]) -> int:
        arguments = [part for row in rows for part in (row.queue_name, row.owed.redis_id, row.message)]
        answers = self.broker.call("publish", self.broker.redis_window, *arguments)
        refused, later, trouble = [], [], ""
        for row, answer in zip(rows, (answer.decode() for answer in answers), strict=True):
            if answer == "full":
                self._full.add(row.queue_name)
                refused.append(row.owed)
            elif answer.startswith("OOM"):
                later.append(row.owed)
            elif answer.startswith("WRONGTYPE"):  # the queue's own fault: it must not stop the others
                logger.error(
                    "Message %r of actor %r cannot be published and is set aside for a minute: %s",
                    row.owed.message_id,
                    row.owed.actor_name,
                    answer,
                )
                self.ledger.set_aside(row.owed, answer)
            elif answer != "ok":  # a replica, a full disk, a missing right: Redis's trouble
                later.append(row.owed)
                trouble = answer
        self.ledger.give_back(refused)
        self.ledger.give_back(later, later_s=LATER_S)  # what is smaller may fit: it comes first
        if trouble:
            raise redis.ResponseError(trouble)
        if later:
            raise _RedisIsFull
        return len(rows) - len(refused)

    def audit(self) -> int:
        """Publish again what is on its way by the ledger and not in Redis; returns how many."""
        rows = self.ledger.on_their_way(AUDIT_AGE_S)
        # Also queues in which nothing is owed: what was sent outside a transaction is repaired too.
        by_queue: dict[str, list[Row]] = {queue: [] for queue in self.broker.get_declared_queues()}
        for row in rows:
            by_queue.setdefault(row.queue_name, []).append(row)
        count = 0
        for queue, its_rows in by_queue.items():
            try:
                count += self._audit_queue(queue, its_rows)
            except redis.ResponseError as error:  # the key's own fault: the others are audited
                logger.error("Queue %r cannot be audited: %s", queue, error)
        if count:
            logger.warning("Redis had lost %d messages of the ledger: they are published again", count)
        return count

    def _audit_queue(self, queue: str, rows: list[Row]) -> int:
        self.broker.call("repair", queue)
        count = 0
        for start in range(0, len(rows), IDS):
            part = rows[start : start + IDS]
            there = self.broker.call("there", queue, *(row.owed.redis_id for row in part))
            lost = (row.owed for row, found in zip(part, there, strict=True) if not found)
            count += self.ledger.give_back(lost)
        return count


def _chunks(rows: list[Row]) -> Iterator[list[Row]]:
    """The rows in portions of at most CHUNK_BYTES; a larger message goes alone (T33)."""
    chunk: list[Row] = []
    size = 0
    for row in rows:
        if chunk and size + row.size > CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
        chunk.append(row)
        size += row.size
    if chunk:
        yield chunk
