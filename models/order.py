"""What customers ordered."""

from __future__ import annotations

from enum import StrEnum

from peewee import SQL, BigAutoField, BigIntegerField, IntegerField, Model, TextField

from middleware.tables import TimestampTZField

from .database import database


class OrderState(StrEnum):
    """Where an order stands: placed; then rejected, or reserved; then shipped, or cancelled."""

    PLACED = "placed"
    REJECTED = "rejected"
    RESERVED = "reserved"
    SHIPPED = "shipped"
    CANCELLED = "cancelled"


class Order(Model):
    """One order of one article.

    Columns:
      id: given by the database.
      sku: which article, always one of `Stock`.
      quantity: how many pieces, at least 1.
      customer: the e-mail address of whoever it is for.
      state: an `OrderState`.
      created_at: when the order was placed, by the database's clock.
      reserved_at: when its stock was reserved, else NULL.
      amount_cents: what it costs, by the price when it was reserved, else NULL.
    """

    id = BigAutoField()
    sku = TextField()
    quantity = IntegerField()
    customer = TextField()
    state = TextField(default=OrderState.PLACED)
    created_at = TimestampTZField(constraints=[SQL("DEFAULT now()")])
    reserved_at = TimestampTZField(null=True)
    amount_cents = BigIntegerField(null=True)

    class Meta:
        database = database
        table_name = "orders"
