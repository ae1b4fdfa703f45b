"""Customers are told what became of their orders."""

from __future__ import annotations

import dramatiq

from models import Notification, Order

from .broker import broker


@dramatiq.actor(broker=broker)
def notify_customer(order_id: int) -> None:
    """Tell the customer where the order stands: shipped, rejected or cancelled.

    Arguments:
      order_id: the id of an `Order`.
    """
    order = Order.get_by_id(order_id)
    Notification.create(order=order, state=order.state)
