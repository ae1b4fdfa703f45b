"""How an order is fulfilled: the steps, in their order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dramatiq import pipeline

from .notifications import notify_customer
from .orders import reserve_stock
from .payments import charge
from .shipments import ship

if TYPE_CHECKING:
    from dramatiq import Actor, Message


def fulfil(order_id: int) -> Message[Any]:
    """Set an order going: stock is reserved, the customer charged, the parcel shipped, the customer told.

    It is a saga: each step that is done names what undoes it, and a step that fails for good sets
    that off. It leaves with the caller's transaction.

    Arguments:
      order_id: the id of an `Order`.

    Returns:
      The message of the first step.
    """
    later: list[Actor[Any, Any]] = [charge, ship, notify_customer]
    steps = pipeline([reserve_stock.message(order_id), *(actor.message() for actor in later)])
    steps.run()
    first: Message[Any] = steps.messages[0]
    return first
