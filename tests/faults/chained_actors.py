"""Actors that set off each other, with points to kill at: `dramatiq tests.faults.chained_actors:broker`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import dramatiq
from dramatiq.middleware import Middleware

import settings
from middleware import DurableRedisBroker, IdempotentConsumer
from models import Barrier, BarrierMember, DeadLetter, Order, OutboxMessage, ProcessedMessage, Tick

from .actors import SKU, pass_point

if TYPE_CHECKING:
    from dramatiq import Broker
    from dramatiq.broker import MessageProxy


def label_of(message: MessageProxy) -> str:
    """The label under which a message passes its points; a callback's is made of its cause's."""
    first = message.args[0]
    return first if isinstance(first, str) else f"{message.actor_name}-{first['args'][0]}"


class Points(Middleware):
    """The points of a delivery that are hooks of Dramatiq's."""

    def before_process_message(self, broker: Broker, message: MessageProxy) -> None:
        pass_point("begin", label_of(message))

    def after_process_message(
        self, broker: Broker, message: MessageProxy, *, result: Any = None, exception: Any = None
    ) -> None:
        pass_point("processed", label_of(message))

    def before_ack(self, broker: Broker, message: MessageProxy) -> None:
        pass_point("ack", label_of(message))

    def after_ack(self, broker: Broker, message: MessageProxy) -> None:
        pass_point("acked", label_of(message))


broker = DurableRedisBroker(
    url=settings.REDIS_URL,
    namespace="chained",
    heartbeat_timeout=settings.HEARTBEAT_TIMEOUT_MS,
    ledger=(OutboxMessage, DeadLetter, Barrier, BarrierMember, Tick),
)
broker.add_middleware(IdempotentConsumer(ProcessedMessage))
broker.add_middleware(Points())


def _write(label: str, text: str) -> None:
    Order.insert(sku=SKU, quantity=1, customer=text).execute()
    pass_point("body", label)


@dramatiq.actor(broker=broker, on_success="cheer")
def take(label: str) -> str:
    """A step that hands its label on."""
    _write(label, label)
    return f"of {label}"


@dramatiq.actor(broker=broker)
def give(label: str, before: str = "nobody") -> None:
    """A step that writes down what it was handed."""
    _write(label, f"{label} {before}")


@dramatiq.actor(broker=broker)
def cheer(message: dict[str, Any], result: str) -> None:
    """A success callback."""
    label = f"cheer-{message['args'][0]}"
    _write(label, f"{label} {result}")


@dramatiq.actor(broker=broker, idempotency="external")
def outside(label: str, before: str = "nobody") -> str:
    """A step with an outside effect."""
    pass_point("body", label)
    return f"{before} and outside"


__all__ = ["broker", "cheer", "give", "outside", "take"]
