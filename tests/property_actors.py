"""The actors of the property test: `dramatiq tests.property_actors`.

The effect of a message is two changes, both or none: an order that carries its label, and a piece
out of stock.
"""

from __future__ import annotations

import dramatiq
from dramatiq.middleware import CurrentMessage, default_middleware

import settings
from middleware import DurableRedisBroker, IdempotentConsumer
from models import Barrier, BarrierMember, DeadLetter, Order, OutboxMessage, ProcessedMessage, Stock, Tick

NAMESPACE = "properties"
SKU = "SKU-1"

#: A killed worker is missed soon.
HEARTBEAT_MS = 1_000

broker = DurableRedisBroker(
    url=settings.REDIS_URL,
    namespace=NAMESPACE,
    heartbeat_timeout=HEARTBEAT_MS,
    ledger=(OutboxMessage, DeadLetter, Barrier, BarrierMember, Tick),
    middleware=[*(kind() for kind in default_middleware), CurrentMessage()],
)
broker.add_middleware(IdempotentConsumer(ProcessedMessage))
dramatiq.set_broker(broker)


class StumbledError(Exception):
    """The first attempt of a message fails."""


def child_of(label: str) -> str:
    """The label of the message that a message sends."""
    return f"{label}, then"


def place_order(label: str) -> None:
    """The change that an application makes in the transaction in which it sends."""
    Order.insert(sku=SKU, quantity=1, customer=label).execute()


def take_effect(label: str) -> None:
    """The business change of a message."""
    place_order(label)
    Stock.update(quantity=Stock.quantity - 1).where(Stock.sku == SKU).execute()


@dramatiq.actor(broker=broker, min_backoff=10, max_backoff=100)
def write(label: str) -> None:
    take_effect(label)


@dramatiq.actor(broker=broker, min_backoff=10, max_backoff=100)
def write_and_send(label: str) -> None:
    write.send(child_of(label))
    take_effect(label)


@dramatiq.actor(broker=broker, min_backoff=10, max_backoff=100)
def stumble_and_send(label: str) -> None:
    write.send(child_of(label))
    take_effect(label)
    message = CurrentMessage.get_current_message()
    if message is not None and not message.options.get("retries"):
        raise StumbledError(label)
