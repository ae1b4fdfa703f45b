"""One decrement as an Onetake actor, on this application's own broker and tables."""

from __future__ import annotations

import dramatiq

from actors.broker import broker
from models import Stock, database

__all__ = ["broker", "with_peewee", "with_sql"]


@dramatiq.actor
def with_peewee(sku: str, _key: str) -> None:
    """Take one piece out of stock, with a query that peewee builds."""
    Stock.update(quantity=Stock.quantity - 1).where(Stock.sku == sku).execute()


@dramatiq.actor
def with_sql(sku: str, _key: str) -> None:
    """Take one piece out of stock, with SQL as text."""
    database.execute_sql("UPDATE stock SET quantity = quantity - 1 WHERE sku = %s", (sku,))
