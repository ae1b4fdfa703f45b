"""What goes wrong in the demo, each thing at its moment: a killed relay, an empty Redis, a killed worker."""

from __future__ import annotations

from contextlib import ExitStack
from time import monotonic
from typing import TYPE_CHECKING, Any

import click
from dramatiq import Message

from middleware.delivery import Owed

if TYPE_CHECKING:
    from .demo_processes import DemoProcesses
    from .interruption import Interruption

#: After how many messages it happens. The worker comes last: what it had in hand is found by the
#: others after heartbeat_timeout, and an empty Redis in between would take the traces of it.
RELAY_IS_KILLED, RELAY_IS_BACK = 200, 300
WORKERS_STAND_STILL, REDIS_IS_EMPTIED = 350, 380
WORKER_IS_KILLED, WORKER_IS_AWAY_FOR = 500, 150

PUBLISH_LIMIT_S = 10

#: Deletes every key of a namespace at one moment, but for one of the demo's own.
#: KEYS: the messages of the queue. ARGV: the pattern of the namespace, the key to spare.
#: Returns the messages that were lost: id, message, id, message...
EMPTY = """
local messages = redis.call("hgetall", KEYS[1])
for _, key in ipairs(redis.call("keys", ARGV[1])) do
  if key ~= ARGV[2] then redis.call("unlink", key) end
end
return messages
"""


class Troubles:
    """What happens to the demo's processes and to Redis while messages are sent.

    Attributes:
      lost_and_owed: messages that Redis lost and the ledger still owed; they come back.
      lost_and_sent_again: messages that Redis lost and nobody else knew of.
      in_hand: deliveries that the killed worker was at.
    """

    def __init__(self, processes: DemoProcesses, interruption: Interruption) -> None:
        self._processes = processes
        self._interruption = interruption
        self._stillness = ExitStack()
        self._worker_is_back = 0
        self.lost_and_owed = 0
        self.lost_and_sent_again = 0
        self.in_hand = 0

    def after(self, sent: int) -> None:
        """Let happen what is due after so many messages."""
        if sent == RELAY_IS_KILLED:
            self._processes.kill("relay")
        elif sent == RELAY_IS_BACK:
            self._processes.start("relay")
        elif sent == WORKERS_STAND_STILL:
            # So that Redis has for certain something to lose that is still to be done.
            self._stillness.enter_context(self._processes.workers_stand_still())
        elif sent == REDIS_IS_EMPTIED:
            with self._stillness:
                lost = self._empty_redis()
            self._send_again(lost)
        elif sent >= WORKER_IS_KILLED and not self.in_hand:
            self.in_hand = self._processes.kill_in_mid_work("threads")
            self._worker_is_back = sent + WORKER_IS_AWAY_FOR
        elif sent == self._worker_is_back:
            self._processes.start("threads")

    def end(self) -> None:
        """Everything has been sent: let the worker come back if it was killed late."""
        if self.in_hand and not self._processes.is_running("threads"):
            self._processes.start("threads")

    def close(self) -> None:
        """Let nobody stand still for ever."""
        self._stillness.close()

    def _empty_redis(self) -> dict[bytes, bytes]:
        """Delete all that this demo has in Redis; returns the messages by their ids."""
        from actors import broker, reserve_stock

        from .demo_actors import COUNTS

        queue = f"{broker.namespace}:{reserve_stock.queue_name}.msgs"
        client: Any = broker.client
        deadline = monotonic() + PUBLISH_LIMIT_S
        while not _owed(client.hkeys(queue)):
            if monotonic() > deadline:
                words = self._processes.last_words()
                raise click.ClickException(f"The relay has published nothing.\n{words}")
            self._processes.check()
            self._interruption.pause(0.01)
        flat = client.eval(EMPTY, 1, queue, f"{broker.namespace}:*", COUNTS)
        lost = dict(zip(flat[::2], flat[1::2], strict=True))
        self.lost_and_owed = _owed(lost)
        return lost

    def _send_again(self, lost: dict[bytes, bytes]) -> None:
        """What was sent outside a transaction was in Redis alone: only its sender can help it."""
        from actors import broker

        for redis_id, raw in lost.items():
            if Owed.of(redis_id.decode()) is None:
                broker.enqueue(Message.decode(raw))
                self.lost_and_sent_again += 1


def _owed(redis_ids: Any) -> int:
    """How many of these messages in Redis are rows that are still owed."""
    from models import OutboxMessage

    found = {owed[:2] for owed in map(Owed.of, (raw.decode() for raw in redis_ids)) if owed}
    rows = OutboxMessage.select(OutboxMessage.message_id, OutboxMessage.actor_name)
    return len(found & {(row.message_id, row.actor_name) for row in rows})
