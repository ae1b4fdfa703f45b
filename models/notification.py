"""What customers were told."""

from __future__ import annotations

from peewee import SQL, BigAutoField, ForeignKeyField, Model, TextField

from middleware.tables import TimestampTZField

from .database import database
from .order import Order


class Notification(Model):
    """One message to a customer, as far as this shop goes: a row.

    Columns:
      id: given by the database.
      order: the `Order` that it is about.
      state: the `OrderState` that the customer was told of.
      told_at: when, by the database's clock.
    """

    id = BigAutoField()
    order = ForeignKeyField(Order)
    order_id: int
    state = TextField()
    told_at = TimestampTZField(constraints=[SQL("DEFAULT now()")])

    class Meta:
        database = database
        table_name = "notifications"
