"""Stock is reserved for an order, and put back if the order cannot be fulfilled."""

from __future__ import annotations

from typing import Any

import dramatiq
from peewee import fn

from models import Order, OrderState, Stock

from .broker import broker
from .notifications import notify_customer


@dramatiq.actor(broker=broker, undone_by="release_stock")
def reserve_stock(order_id: int) -> int:
    """Take what was ordered out of stock; the order is then reserved, or else rejected.

    It looks at no state to find out whether it ran before: the middleware inserts the message's
    key in the same transaction, so this takes effect once however often the message comes.

    Arguments:
      order_id: the id of an `Order`.

    Returns:
      The same.

    Raises:
      Order.DoesNotExist: there is no such order.
    """
    order = Order.get_by_id(order_id)
    taken = list(
        Stock.update(quantity=Stock.quantity - order.quantity)
        .where((Stock.sku == order.sku) & (Stock.quantity >= order.quantity))
        .returning(Stock.price_cents)
        .execute()
    )
    if taken:
        amount_cents = order.quantity * taken[0].price_cents
        changes = {"state": OrderState.RESERVED, "reserved_at": fn.now(), "amount_cents": amount_cents}
    else:
        changes = {"state": OrderState.REJECTED}
    Order.update(**changes).where(Order.id == order_id).execute()
    return order_id


@dramatiq.actor(broker=broker)
def release_stock(_step: dict[str, Any], order_id: int) -> None:
    """Put back what was reserved for an order that is cancelled, and tell the customer.

    Arguments:
      order_id: what `reserve_stock` returned.
    """
    cancelled = list(
        Order.update(state=OrderState.CANCELLED)
        .where((Order.id == order_id) & (Order.state == OrderState.RESERVED))
        .returning(Order.sku, Order.quantity)
        .execute()
    )
    for order in cancelled:  # one, or none if it was rejected
        Stock.update(quantity=Stock.quantity + order.quantity).where(Stock.sku == order.sku).execute()
        notify_customer.send(order_id)  # leaves with the commit, and not without it
