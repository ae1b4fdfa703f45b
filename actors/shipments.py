"""What was paid is shipped."""

from __future__ import annotations

import dramatiq

from models import Order, OrderState, Shipment

from .broker import broker

#: No parcel arrives there (RFC 2606).
NOWHERE = ".invalid"


class UndeliverableError(Exception):
    """No carrier takes a parcel there: trying again cannot help."""


@dramatiq.actor(broker=broker, throws=UndeliverableError)
def ship(charged: list[int | None]) -> int | None:
    """Send a parcel, if the order was charged.

    Arguments:
      charged: what `charge` returned.

    Returns:
      The id of the order.

    Raises:
      UndeliverableError: then the charge is refunded, and the order cancelled.
    """
    order_id, charge_id = charged
    if charge_id is not None:
        order = Order.get_by_id(order_id)
        if order.customer.endswith(NOWHERE):
            raise UndeliverableError(f"Order {order_id} goes to {order.customer}, which is nowhere.")
        Shipment.create(order=order, charge_id=charge_id)
        Order.update(state=OrderState.SHIPPED).where(Order.id == order_id).execute()
    return order_id
