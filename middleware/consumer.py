"""The Consumer of one queue: it acknowledges what is settled and gives back everything else.

Worker threads only write down how their deliveries ended. The consumer thread tells Redis together
with its next fetch, in one script. An acknowledgement may be late (it comes after the commit, and a
duplicate is harmless) but never early. The notes outlive a failed call and a restart of the thread.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import replace
from itertools import chain
from math import inf
from threading import Event, Lock
from time import monotonic
from typing import TYPE_CHECKING, Any

import redis
from dramatiq import Consumer, Message
from dramatiq.errors import ConnectionClosed, DecodeError

from . import payload
from .delivery import Delivery, Owed
from .ends import is_of_the_server
from .errors import InvalidKey, InvalidMessage
from .ledger import letter_of
from .settlement import settle

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dramatiq.broker import MessageProxy

    from .broker import DurableRedisBroker
    from .ledger import Ledger

logger = logging.getLogger("onetake")

#: The longest a message waits in Redis while there is room, and a note waits to be told.
POLL_S = 0.1
#: An empty queue is asked again after this long, then half as often each time, up to POLL_S.
FIRST_POLL_S = 0.002
#: A delivery without a key would be run again after a kill: its acknowledgement is told soon.
SOON_S = 0.004
#: An absent Redis is asked again this often.
AWAY_S = 0.5
#: So often a worker compares what it has in hand with what Redis believes: a Redis that came back
#: from an older snapshot tells nobody.
CHECK_S = 3.0
#: Ids in one call, well below what Lua can unpack.
BATCH = 1_000


class DurableConsumer(Consumer):
    """Hands out the messages of one queue as deliveries; one object for each queue of a worker.

    Arguments:
      broker: whose Redis, namespace and worker id it uses.
      queue_name: the queue, or the delay queue where it ends in ".DQ".
    """

    def __init__(self, broker: DurableRedisBroker, queue_name: str) -> None:
        self.broker = broker
        self.queue_name = queue_name
        self.delayed = queue_name.endswith(".DQ")
        self.prefetch = 1
        #: Ids that this worker may still run: running, waiting in memory, or in `ready`.
        self.in_hand: set[str] = set()
        self.ready: deque[tuple[str, bytes]] = deque()
        #: What is not fit to run: its id, its bytes, and as far as known the message and what is wrong.
        self.diverted: deque[tuple[str, bytes, Message[Any] | None, BaseException | None]] = deque()
        self.acks: deque[str] = deque()
        self.dead: deque[str] = deque()
        self.returns: deque[str] = deque()
        #: What Redis believes is in our hands may be more than what is.
        self.doubtful = True
        self.checked_s = 0.0
        self.stopping = False
        self.lock = Lock()
        self.wake = Event()
        #: The thread waits for room and nothing else.
        self.hungry = False
        self.poll_s = 0.0
        self.next_poll_s = self.last_exchange_s = 0.0
        self.tell_by_s = inf

    def open(self, prefetch: int) -> DurableConsumer:
        """A consumer thread begins, or begins again, to iterate."""
        with self.lock:
            self.prefetch = prefetch
            if self.delayed:  # the thread alone held these, and it has forgotten them (T31)
                self.in_hand.clear()
                self.ready.clear()
            self.doubtful = True
        return self

    # The consumer thread

    def __next__(self) -> Delivery | None:
        if self.diverted and self.broker.ledger is not None:
            self._divert(self.broker.ledger)
        if not self.ready and self._wait():
            self.exchange()
        while self.ready:
            delivery = self._decode(*self.ready.popleft())
            if delivery is not None:
                return delivery
        return None

    def _wait(self) -> bool:
        """Wait until there is something to tell or to ask; False when nothing came up."""
        give_up_s = monotonic() + POLL_S
        while True:
            self.hungry = True
            due_s = self._due_s()  # looks at the room again after every wake-up (T40)
            now_s = monotonic()
            if due_s <= now_s or now_s >= give_up_s:
                self.hungry = False
                return due_s <= now_s
            self.wake.wait(min(due_s, give_up_s) - now_s)
            self.wake.clear()

    def _due_s(self) -> float:
        """When the next exchange is due: at once with enough room, soon with any, else for notes."""
        due_s = min(self.tell_by_s, self.checked_s + CHECK_S)
        room = self.room
        if room > 0 and not self.stopping:
            enough = 2 * room >= self.prefetch
            due_s = min(due_s, self.next_poll_s if enough else self.last_exchange_s + POLL_S)
        return max(due_s, self.next_poll_s if self.broker.outage.lasts else 0.0)

    @property
    def room(self) -> int:
        return self.prefetch - len(self.in_hand)

    def exchange(self) -> bool:
        """Tell Redis what became of the deliveries, and fetch what there is room for.

        Returns:
          Whether Redis answered; if not, everything is kept for the next time.
        """
        with self.lock:
            self.tell_by_s = inf
            notes = [_take(kind) for kind in (self.acks, self.dead, self.returns)]
            wanted = 0 if self.stopping else max(0, min(self.room, BATCH))
            try:
                if self.doubtful or monotonic() >= self.checked_s + CHECK_S:
                    self._give_back_what_is_not_in_hand(notes)
                counts = [len(ids) for ids in notes]
                ids, messages = self.broker.call(
                    "exchange", self.queue_name, self.broker.broker_id, wanted, *counts, *chain(*notes)
                )
            except redis.RedisError as error:
                self._keep(notes, error)
                return False
            self.broker.outage.ends()
            self._receive(ids, messages, wanted)
            return True

    def _receive(self, ids: list[bytes], messages: list[bytes | None], wanted: int) -> None:
        for raw_id, message in zip(ids, messages, strict=True):
            redis_id = raw_id.decode("utf-8", "surrogateescape")
            if message is None:  # emptied meanwhile: its id leaves our hand with the next exchange
                self._note(self.acks, redis_id)
            else:
                self.in_hand.add(redis_id)
                self.ready.append((redis_id, message))
        self.last_exchange_s = monotonic()
        if wanted:
            full = len(ids) >= wanted
            self.poll_s = 0.0 if full else min(max(2 * self.poll_s, FIRST_POLL_S), POLL_S)
            self.next_poll_s = self.last_exchange_s + self.poll_s

    def _keep(self, notes: list[list[str]], error: redis.RedisError) -> None:
        for kind, ids in zip((self.acks, self.dead, self.returns), notes, strict=True):
            kind.extendleft(reversed(ids))
        self.doubtful = True  # a fetch may have happened whose answer was lost (T32)
        self.broker.outage.begins(error)
        self.next_poll_s = monotonic() + AWAY_S
        if any(notes):
            self.tell_by_s = self.next_poll_s

    def _give_back_what_is_not_in_hand(self, notes: list[list[str]]) -> None:
        # Only this thread adds to the set in Redis, so nothing can come in between (T31, T32).
        held = self.in_hand.union(*notes)  # before Redis is asked: a delivery may end meanwhile
        believed = {
            raw_id.decode("utf-8", "surrogateescape") for raw_id in self.broker.ids_in_hand(self.queue_name)
        }
        lost = sorted(believed - held)
        notes[2].extend(lost[:BATCH])
        self.doubtful = len(lost) > BATCH
        self.checked_s = monotonic()

    def _decode(self, redis_id: str, raw: bytes) -> Delivery | None:
        """A message that is fit to run now; any other takes another way, and None is returned."""
        message: Message[Any] | None = None
        try:
            message = Message.decode(raw)
            payload.check_depth(raw, message)
            payload.check_fields(message)
        except (DecodeError, InvalidMessage, InvalidKey) as error:  # T21
            reason = error.error if isinstance(error, DecodeError) else error
            logger.error(
                "Message %s of queue %r cannot be worked with and is a dead letter: %s",
                redis_id,
                self.queue_name,
                reason,
            )
            if self.broker.ledger is None:
                self._end(self.dead, redis_id)
            else:
                self.diverted.append((redis_id, raw, message, reason))
            return None
        if self.broker.ledger is not None and (self.delayed or "eta" in message.options):
            self.diverted.append((redis_id, raw, message, None))
            return None
        if message.queue_name != self.queue_name:  # the worker looks its consumer up by this name
            message = replace(message, queue_name=self.queue_name)
        return Delivery(message, redis_id, raw)

    def _divert(self, ledger: Ledger) -> None:
        """Store what is not fit to run now: what has its time still to come, what nobody can read.

        Neither must reach the stock thread: it would keep the one in its memory (T39) and drop the
        good messages that came with the other (T21).
        """
        while self.diverted:
            redis_id, raw, message, error = self.diverted[0]
            try:
                if message is not None and error is None:
                    ledger.owe_later(message, Owed.of(redis_id))
                else:
                    letter = letter_of(raw, self.queue_name, message, "not readable", error)
                    ledger.divert(Owed.of(redis_id), letter, message)
            except Exception as failure:  # noqa: BLE001 - the thread of the consumer has to go on
                ledger.database.discard()
                if is_of_the_server(failure):
                    self.broker.guard.outage.begins(failure)
                    return  # tried again with the next exchange
                if message is not None or error is None:  # T13: again, in a form that fits
                    self.diverted[0] = (redis_id, raw, None, error or failure)
                    continue
                logger.error("Message %r cannot be stored (%s): Redis keeps it", redis_id, failure)
                self.diverted.popleft()
                self._end(self.dead, redis_id)
                continue
            self.diverted.popleft()
            self._end(self.acks, redis_id)

    # The worker threads

    def ack(self, message: MessageProxy) -> None:
        """The delivery has ended; only what is settled is acknowledged (T22)."""
        assert isinstance(message, Delivery)
        # Without a ledger: what the stock thread moved, when its time had come, is in its queue by now;
        # no worker thread ever gets a message with an eta.
        if self.delayed or "eta" in message.options:
            message.settled = True
        if not message.settled and not message.given_back:
            settle(self.broker, message)
        if message.settled:
            self._end(self.acks, message.redis_id, soon=message.unguarded)
        else:
            self._end(self.dead if message.dead else self.returns, message.redis_id)

    def nack(self, message: MessageProxy) -> None:
        """The delivery has ended, and failed for good."""
        self.ack(message)

    def requeue(self, messages: Iterable[MessageProxy]) -> None:
        """Give back messages that were not begun, at once.

        Raises:
          ConnectionClosed: Redis is away; they are given back by the sweep of another worker.
        """
        for message in messages:
            self.give_back(message)
        if self.returns and not self.exchange():
            raise ConnectionClosed(f"Redis is away: messages of {self.queue_name!r} return later")

    def give_back(self, message: MessageProxy) -> None:
        """A message that was not begun goes back to its queue with the next exchange."""
        assert isinstance(message, Delivery)
        self._end(self.returns, message.redis_id)

    def stop_fetching(self) -> None:
        """From now on nothing is fetched; what was fetched and not handed out goes back."""
        with self.lock:
            self.stopping = True
            while self.ready:
                self._end(self.returns, self.ready.popleft()[0])
        self.wake.set()

    def close(self) -> None:
        """Tell Redis what is left to tell; the object stays fit for use."""
        # A worker that stops asks an absent Redis once, not once for each queue.
        if (self.acks or self.dead or self.returns) and not (self.stopping and self.broker.outage.lasts):
            self.exchange()

    def _end(self, kind: deque[str], redis_id: str, *, soon: bool = False) -> None:
        self._note(kind, redis_id, soon=soon)
        self.in_hand.discard(redis_id)
        if soon or (self.hungry and self.next_poll_s <= monotonic() and 2 * self.room >= self.prefetch):
            self.hungry = False
            self.wake.set()

    def _note(self, kind: deque[str], redis_id: str, *, soon: bool = False) -> None:
        kind.append(redis_id)
        self.tell_by_s = min(self.tell_by_s, monotonic() + (SOON_S if soon else POLL_S))


def _take(notes: deque[str]) -> list[str]:
    """Take up to a batch of notes; other threads may add some meanwhile."""
    return [notes.popleft() for _ in range(min(len(notes), BATCH))]
