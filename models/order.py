"""What customers ordered."""

from __future__ import annotations

from enum import StrEnum

from peewee import SQL, BigAutoField, IntegerField, Model, TextField

from middleware.tables import TimestampTZField

from .database import database


class OrderState(StrEnum):
    """Where an order stands: placed, then rejected, or reserved and at last confirmed."""

    PLACED = "placed"
    RESERVED = "reserved"
    REJECTED = "rejected"
    CONFIRMED = "confirmed"


class Order(Model):
    """One order of one article.

    Columns:
      id: given by the database.
      sku: which article, always one of `Stock`.
      quantity: how many pieces, at least 1.
      customer: whom the order is for.
      state: an `OrderState`.
      created_at: when the order was placed, by the database's clock.
      reserved_at: when its stock was reserved, else NULL.
      confirmed_at: when the customer could be told that it comes, else NULL.
    """

    id = BigAutoField()
    sku = TextField()
    quantity = IntegerField()
    customer = TextField()
    state = TextField(default=OrderState.PLACED)
    created_at = TimestampTZField(constraints=[SQL("DEFAULT now()")])
    reserved_at = TimestampTZField(null=True)
    confirmed_at = TimestampTZField(null=True)

    class Meta:
        database = database
        table_name = "orders"
