"""What a message sets off leaves with its transaction, under ids that are the same in every attempt (T24).

Dramatiq's Callbacks, Pipelines and GroupCallbacks act after the commit, so a crash in between loses
what follows (T10). On a broker with a ledger these take their places, wherever they stand. On others
Dramatiq's own are made to overlook redeliveries.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from dramatiq import Message
from dramatiq.middleware import Callbacks, GroupCallbacks, Middleware, Pipelines

from .delivery import Delivery, current
from .errors import InvalidResult
from .groups import Barriers
from .identity import derived_id
from .sagas import undoing

if TYPE_CHECKING:
    from dramatiq import Actor, Broker
    from dramatiq.broker import MessageProxy

    from .broker import DurableRedisBroker


class Continuation(Middleware):
    """A middleware that sends what a message sets off, in the transaction of the message."""

    def follows(self, message: MessageProxy, actor: Actor[Any, Any]) -> bool:
        """Whether the message sets something off."""
        raise NotImplementedError

    def set_off(
        self, broker: DurableRedisBroker, delivery: Delivery, actor: Actor[Any, Any], result: Any
    ) -> None:
        """Send what follows, in the caller's transaction."""
        raise NotImplementedError

    def after_process_message(
        self, broker: Broker, message: MessageProxy, *, result: Any = None, exception: Any = None
    ) -> None:
        """Nothing is left to do after the commit."""


class OutboxCallbacks(Continuation, Callbacks):
    """Callbacks that leave with the message's transaction, or with its retry or dead letter (T37)."""

    def follows(self, message: MessageProxy, actor: Actor[Any, Any]) -> bool:
        return bool(message.options.get("on_success") or actor.options.get("on_success"))

    def set_off(
        self, broker: DurableRedisBroker, delivery: Delivery, actor: Actor[Any, Any], result: Any
    ) -> None:
        target = broker.get_actor(delivery.options.get("on_success") or actor.options["on_success"])
        message = target.message(delivery.as_it_came().asdict(), result)
        _send(broker, delivery, message, derived_id(delivery.message_id, "on_success"))

    def after_process_message(
        self, broker: Broker, message: MessageProxy, *, result: Any = None, exception: Any = None
    ) -> None:
        actor = broker.actors.get(message.actor_name)
        name = message.options.get("on_failure") or (actor and actor.options.get("on_failure"))
        if exception is None or not name:
            return
        assert isinstance(message, Delivery)
        current.collects = message  # also where a hook failed and no body ran
        error = {"type": type(exception).__name__, "message": str(exception)}
        callback = broker.get_actor(name).message(message.as_it_came().asdict(), error)
        _send(broker, message, callback, derived_id(message.message_id, "on_failure", message.attempt))


class OutboxPipelines(Continuation, Pipelines):
    """Pipelines whose next step leaves with the transaction of the one before."""

    def follows(self, message: MessageProxy, actor: Actor[Any, Any]) -> bool:
        return message.options.get("pipe_target") is not None and not message.failed

    def set_off(
        self, broker: DurableRedisBroker, delivery: Delivery, actor: Actor[Any, Any], result: Any
    ) -> None:
        step: Message[Any] = Message(**delivery.options["pipe_target"])
        if not (step.options.get("pipe_ignore") or actor.options.get("pipe_ignore")):
            step = step.copy(args=(*step.args, result))
        undo = undoing(broker, delivery, actor, result)
        if undo is not None:
            step = step.copy(options={"undo": undo})
        _send(broker, delivery, step, step.message_id, delay=step.options.get("delay"))


class OutboxGroupCallbacks(Continuation, GroupCallbacks):
    """Completion callbacks that leave with the transaction of the last member (T25)."""

    def __init__(self) -> None:
        super().__init__(Barriers())

    def follows(self, message: MessageProxy, actor: Actor[Any, Any]) -> bool:
        return "group_completion_uuid" in message.options

    def set_off(
        self, broker: DurableRedisBroker, delivery: Delivery, actor: Actor[Any, Any], result: Any
    ) -> None:
        assert broker.ledger is not None
        for callback in broker.ledger.arrive(delivery.message_id):
            broker.enqueue(callback)


def in_place_of(middleware: Middleware) -> Middleware:
    """What stands in a stack of ours for a middleware of Dramatiq's."""
    kind = type(middleware)
    if kind is Callbacks:
        return OutboxCallbacks()
    if kind is Pipelines:
        return OutboxPipelines()
    if kind is GroupCallbacks:
        return OutboxGroupCallbacks()
    return middleware


def _send(
    broker: Broker,
    delivery: Delivery,
    message: Message[Any],
    message_id: str,
    delay: int | None = None,
) -> None:
    try:
        broker.enqueue(message._replace(message_id=message_id), delay=delay)
    except (TypeError, ValueError, RecursionError) as error:  # the encoder's (T13)
        raise InvalidResult(
            f"The result of message {delivery.message_id!r} cannot be handed on to actor "
            f"{message.actor_name!r}: {error}. Return what the message encoder can hold."
        ) from error


def spare_redeliveries(broker: Broker) -> None:
    """Let Dramatiq's own continuations in a stack overlook redeliveries (I5)."""
    for middleware in broker.middleware:
        ours = isinstance(middleware, Continuation)
        if isinstance(middleware, Callbacks | Pipelines | GroupCallbacks) and not ours:
            _spare(middleware)


def _spare(middleware: Middleware) -> None:
    hook = middleware.after_process_message
    if getattr(hook, "spares_redeliveries", False):
        return

    @functools.wraps(hook)
    def after_process_message(broker: Broker, message: MessageProxy, **outcome: Any) -> None:
        if not current.redelivered:
            hook(broker, message, **outcome)

    after_process_message.spares_redeliveries = True  # type: ignore[attr-defined] # our own mark
    middleware.after_process_message = after_process_message  # type: ignore[method-assign] # one instance
