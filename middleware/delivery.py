"""The delivery: one attempt at a message, and which one this thread is performing."""

from __future__ import annotations

import dataclasses
import re
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

from dramatiq import Message
from dramatiq.broker import MessageProxy

if TYPE_CHECKING:
    from .groups import HeldGroup

#: No message of ours comes near to this.
MOST_ATTEMPTS = 100_000_000

_owed = re.compile(r"owed-(\d{1,9})-(\d{1,9})-(.*)", re.DOTALL).fullmatch


class Owed(NamedTuple):
    """Which row of the ledger a message has, and of which attempt."""

    message_id: str
    actor_name: str
    attempt: int

    @property
    def redis_id(self) -> str:
        """The same for the same row and attempt, so that publishing it twice is harmless."""
        return f"owed-{self.attempt}-{len(self.actor_name)}-{self.actor_name}{self.message_id}"

    @classmethod
    def of(cls, redis_id: str) -> Owed | None:
        """The row that a message in Redis came from, None if it came from no row."""
        found = _owed(redis_id)
        if found is None:
            return None
        attempt, size, names = int(found[1]), int(found[2]), found[3]
        # A name that PostgreSQL cannot store is in no row.
        if (
            attempt >= MOST_ATTEMPTS
            or not names[:size]
            or "\0" in names
            or any("\ud800" <= one <= "\udfff" for one in names)
        ):
            return None
        return cls(names[size:], names[:size], attempt)


class Delivery(MessageProxy):
    """A message that our Consumer handed out, and what became of it.

    `settled` is the fail-safe of the whole house: it is set in one place per end, after that end
    is safe, and the Consumer acknowledges nothing that is not settled (T22).
    """

    def __init__(self, message: Message[Any], redis_id: str, raw: bytes, *, foreign: bool = False) -> None:
        super().__init__(message)
        #: Another broker handed it out, and will acknowledge it whatever becomes of it.
        self.foreign = foreign
        #: Its id in Redis, new at every enqueue; the message id stays.
        self.redis_id = redis_id
        #: Its row in the ledger, None if it came from none.
        self.owed = Owed.of(redis_id)
        #: The message as it came.
        self.raw = raw
        #: The end is safe: committed, duplicate, skipped, retry stored, dead letter stored.
        self.settled = False
        #: The delivery ended without an outcome: the message goes back to its queue.
        self.given_back = False
        #: Without a ledger: it becomes a dead letter in Redis.
        self.dead = False
        #: Nothing remains to be done: skipped, or answered as a duplicate.
        self.done = False
        #: What Retries decided (a message and its delay in milliseconds), and what was sent meanwhile
        #: (statements on the ledger): stored together with the end.
        self.retry: tuple[Message[Any], float] | None = None
        self.sent: list[tuple[str, tuple[Any, ...]]] = []
        #: What it sets off is still to be stored, with this result.
        self.follows = False
        self.result: Any = None
        #: It was answered: another message under its business key did the work.
        self.answered = False
        #: Its key is taken by a cancellation.
        self.cancelled = False
        #: The actor opted out of the transaction: a kill before the acknowledgement runs it again.
        self.unguarded = False
        #: The body runs; what it enqueues is no retry, not even this very message.
        self.running = False
        #: Consumer name and key, while a body with outside effects runs.
        self.outside: tuple[str, str] | None = None

    @property
    def attempt(self) -> int:
        """The attempt of its row; 0 where it has none."""
        return self.owed.attempt if self.owed else 0

    def as_it_came(self) -> Message[Any]:
        """This message with the arguments that arrived, whatever the body did to them (T17)."""
        original = Message.decode(self.raw)
        return dataclasses.replace(self._message, args=original.args, kwargs=original.kwargs)

    def finish(self, result: Any = None, *, follows: bool = False) -> None:
        """Nothing remains to be done, but for its row in the ledger and for what it sets off, if any."""
        self.result, self.follows = result, follows
        self.done = self.owed is not None or follows
        self.settled = not self.done


class _Current(threading.local):
    """What this thread or greenlet is performing."""

    #: Whether it is one of Dramatiq's worker threads.
    in_worker = False
    #: The delivery in hand, and Dramatiq's proxy of it: the same object, but on foreign brokers.
    delivery: Delivery | None = None
    proxy: MessageProxy | None = None
    #: The performer took the delivery: an actor that is called from now on is called as a function.
    taken = False
    #: What is sent now is stored with the end of this delivery: its body has failed, or has no
    #: transaction because its effects are outside.
    collects: Delivery | None = None
    #: A group that is being run: its members are held until the last is there.
    group: HeldGroup | None = None
    #: The message in hand was performed before: what it set off is not set off again (I5).
    redelivered = False

    def begin(self, message: MessageProxy) -> None:
        """A message comes into hand."""
        self.proxy = message
        self.taken = False
        self.collects = None
        self.redelivered = False
        if isinstance(message, Delivery):
            self.delivery = message
        else:
            self.delivery = Delivery(message._message, "", message.encode(), foreign=True)

    def fail(self, delivery: Delivery) -> None:
        """The body has failed; from now on everybody sees the message as it came (T17)."""
        delivery._message = delivery.as_it_came()
        if self.proxy is not None:
            self.proxy._message = delivery._message
        delivery.sent.clear()
        if not delivery.foreign:
            self.collects = delivery

    @property
    def parent_id(self) -> str | None:
        """The message that sets off what is sent now, None where nothing is being performed."""
        parent = self.collects or self.delivery
        return parent.message_id if parent is not None else None


current = _Current()
