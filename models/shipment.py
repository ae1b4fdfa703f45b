"""What was sent to customers."""

from __future__ import annotations

from peewee import SQL, BigAutoField, BigIntegerField, ForeignKeyField, Model

from middleware.tables import TimestampTZField

from .database import database
from .order import Order


class Shipment(Model):
    """One parcel. That an order has one is the work of its message's key: nothing here would refuse a second.

    Columns:
      id: given by the database.
      order: an `Order`.
      charge_id: the charge with which it was paid, NULL for one from before there were charges.
      shipped_at: when, by the database's clock.
    """

    id = BigAutoField()
    order = ForeignKeyField(Order)
    order_id: int
    charge_id = BigIntegerField(null=True)
    shipped_at = TimestampTZField(constraints=[SQL("DEFAULT now()")])

    class Meta:
        database = database
        table_name = "shipments"
