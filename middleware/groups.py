"""A group and its barrier leave together or not at all, and its completion is counted in PostgreSQL (T25).

`group.run()` first asks a rate limiter for a barrier and then enqueues its members one by one. Here the
barrier is only noted, the members are held, and the last one brings all of it into one transaction.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dramatiq.rate_limits import RateLimiterBackend

from .delivery import current
from .identity import derived_id

if TYPE_CHECKING:
    from dramatiq import Message

    from .broker import DurableRedisBroker


@dataclass
class HeldGroup:
    """The members of a group that is being run, each with its delay in milliseconds."""

    uuid: str
    size: int
    members: list[tuple[Message[Any], int | None]] = field(default_factory=list)


class Barriers(RateLimiterBackend):
    """What `group.run()` takes for a rate limiter: it notes the barrier for this thread."""

    def add(self, key: str, value: int, ttl: int) -> bool:
        current.group = HeldGroup(key, value)
        return True


def hold(broker: DurableRedisBroker, message: Message[Any], delay: int | None) -> bool:
    """Hold a member of the group that this thread is running; the last one sends them all.

    Returns:
      Whether the message is such a member.

    Raises:
      Whatever sending raises; then nothing of the group was sent.
    """
    group = current.group
    if group is None or _last_step(message)[1].get("group_completion_uuid") != group.uuid:
        return False
    group.members.append((message, delay))
    if len(group.members) == group.size:
        current.group = None
        _send(broker, group)
    return True


def _send(broker: DurableRedisBroker, group: HeldGroup) -> None:
    ledger = broker.ledger
    assert ledger is not None
    last_steps = [_last_step(message) for message, _ in group.members]
    # A message is performed once, however often it stands in its group; and a group that is run twice
    # has the same members, hence the same barrier.
    member_ids = sorted({message_id for message_id, _ in last_steps})
    callbacks = last_steps[0][1]["group_completion_callbacks"]
    barrier = ledger.barrier_of(derived_id("barrier", *member_ids), member_ids, callbacks)
    if current.collects is not None:
        current.collects.sent.append(barrier)
        _enqueue(broker, group)
    else:
        with ledger.database.atomic():
            ledger.database.execute_sql(*barrier)
            _enqueue(broker, group)


def _enqueue(broker: DurableRedisBroker, group: HeldGroup) -> None:
    for message, delay in group.members:
        broker.enqueue(message, delay=delay)


def _last_step(message: Message[Any]) -> tuple[str, dict[str, Any]]:
    """Id and options of the last step of a pipeline; of a message that is none, its own."""
    message_id, options = message.message_id, message.options
    while (step := options.get("pipe_target")) is not None:
        message_id, options = step["message_id"], step["options"]
    return message_id, options
