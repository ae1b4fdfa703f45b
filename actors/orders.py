"""What happens to an order after it was placed."""

from __future__ import annotations

import dramatiq
from peewee import fn

from models import Order, OrderState, Stock

from .broker import broker


@dramatiq.actor(broker=broker)
def reserve_stock(order_id: int) -> None:
    """Take what was ordered out of stock; the order is then reserved, or else rejected.

    It looks at no state to find out whether it ran before: the middleware inserts the message's
    key in the same transaction, so this takes effect once however often the message comes.

    Arguments:
      order_id: the id of an `Order`.

    Raises:
      Order.DoesNotExist: there is no such order.
    """
    order = Order.get_by_id(order_id)
    taken = (
        Stock.update(quantity=Stock.quantity - order.quantity)
        .where((Stock.sku == order.sku) & (Stock.quantity >= order.quantity))
        .execute()
    )
    if taken:
        changes = {Order.state: OrderState.RESERVED, Order.reserved_at: fn.now()}
        confirm_order.send(order_id)  # leaves with the commit, and not without it
    else:
        changes = {Order.state: OrderState.REJECTED}
    Order.update(changes).where(Order.id == order_id).execute()


@dramatiq.actor(broker=broker)
def confirm_order(order_id: int) -> None:
    """Confirm an order whose stock is reserved.

    Arguments:
      order_id: the id of an `Order`.
    """
    changes = {Order.state: OrderState.CONFIRMED, Order.confirmed_at: fn.now()}
    Order.update(changes).where((Order.id == order_id) & (Order.state == OrderState.RESERVED)).execute()
