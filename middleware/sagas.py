"""A saga is a pipeline whose steps name what undoes them (``undone_by``).

Each step hands on to the next, as option ``undo``, one message: the first of a pipeline that undoes the
steps so far, the latest first. It is sent by the transaction that writes the dead letter of a later step.
(H. Garcia-Molina, K. Salem: Sagas, SIGMOD 1987.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dramatiq import Message

from .identity import derived_id

if TYPE_CHECKING:
    from dramatiq import Actor, Broker

    from .delivery import Delivery

#: What a step's message needs no longer when it is undone; it would grow with every step.
_OF_THE_CHAIN = ("pipe_target", "undo", "group_completion_uuid", "group_completion_callbacks")


def undoing(broker: Broker, delivery: Delivery, actor: Actor[Any, Any], result: Any) -> dict[str, Any] | None:
    """The message that undoes a step that is done and those before it, as a dict; None: nothing does.

    A step that was answered because another message had done its work is not undone: that one's saga
    may have succeeded.
    """
    before: dict[str, Any] | None = delivery.options.get("undo")
    name = delivery.options.get("undone_by") or actor.options.get("undone_by")
    if not name or delivery.answered:
        return before
    step = delivery.as_it_came()
    step = step._replace(
        options={key: value for key, value in step.options.items() if key not in _OF_THE_CHAIN}
    )
    undo = broker.get_actor(name).message(step.asdict(), result)
    options = undo.options | {"pipe_ignore": True} | ({"pipe_target": before} if before else {})
    return undo._replace(message_id=derived_id(delivery.message_id, "undo"), options=options).asdict()


def undo_of(message: Message[Any]) -> Message[Any] | None:
    """What is to be sent when this message has failed for good, None where nothing is."""
    undo = message.options.get("undo") if type(message.options) is dict else None
    try:
        return Message(**undo) if undo is not None else None
    except TypeError:  # no message: then this one was refused for it (`payload.check_fields`)
        return None
