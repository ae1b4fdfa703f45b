"""The delivery: one attempt at a message, and which one this thread is performing."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

from dramatiq import Message
from dramatiq.broker import MessageProxy


class Delivery(MessageProxy):
    """A message that our Consumer handed out, and what became of it.

    `settled` is the fail-safe of the whole house: it is set in one place per end, after that end
    is safe, and the Consumer acknowledges nothing that is not settled (T22).
    """

    def __init__(self, message: Message[Any], redis_id: str, raw: bytes) -> None:
        super().__init__(message)
        #: Its id in Redis, new at every enqueue; the message id stays.
        self.redis_id = redis_id
        #: The message as it came.
        self.raw = raw
        #: The end is safe: committed, duplicate, skipped, retry stored, dead letter stored.
        self.settled = False
        #: The delivery ended without an outcome: the message goes back to its queue.
        self.given_back = False
        #: The actor opted out of the transaction: a kill before the acknowledgement runs it again.
        self.unguarded = False
        #: The body runs; what it enqueues is no retry, not even this very message.
        self.running = False
        #: The first run of this message set everything off already (I5).
        self.redelivered = False

    def as_it_came(self) -> Message[Any]:
        """This message with the arguments that arrived, whatever the body did to them (T17)."""
        return restored(self._message, self.raw)


def restored(message: Message[Any], raw: bytes) -> Message[Any]:
    """A message with its present options and the arguments it was encoded with (T17)."""
    original = Message.decode(raw)
    return dataclasses.replace(message, args=original.args, kwargs=original.kwargs)


class _Current(threading.local):
    """What this thread or greenlet is performing."""

    #: Whether it is one of Dramatiq's worker threads.
    in_worker = False
    message: MessageProxy | None = None
    raw = b""
    #: The wrapper took the message: an actor that is called from now on is called as a function.
    taken = False


current = _Current()
