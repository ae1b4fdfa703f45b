"""The same guarantee, written by hand in peewee on Dramatiq's own broker.

It is what one writes without Onetake, at its best: the key travels as an argument, the connection
of each thread stays open, and nothing but Dramatiq's default middleware is in the stack.
"""

from __future__ import annotations

import dramatiq
from dramatiq.brokers.redis import RedisBroker
from peewee import (
    SQL,
    CompositeKey,
    IntegerField,
    IntegrityError,
    Model,
    PostgresqlDatabase,
    TextField,
)

import settings
from middleware.tables import TimestampTZField

database = PostgresqlDatabase(settings.DATABASE_URL)
broker = RedisBroker(url=settings.REDIS_URL, namespace=settings.REDIS_NAMESPACE)
dramatiq.set_broker(broker)


class ProcessedKey(Model):
    """Which keys were seen."""

    consumer_name = TextField()
    message_id = TextField()
    processed_at = TimestampTZField(constraints=[SQL("DEFAULT now()")])

    class Meta:
        database = database
        primary_key = CompositeKey("consumer_name", "message_id")
        table_name = "processed_keys"


class Stock(Model):
    """The same table that Onetake's actors work on."""

    sku = TextField(primary_key=True)
    quantity = IntegerField()

    class Meta:
        database = database
        table_name = "stock"


@dramatiq.actor
def by_hand(sku: str, key: str) -> None:
    """Take one piece out of stock, once for each key."""
    try:
        with database.atomic():
            ProcessedKey.insert(consumer_name="by_hand", message_id=key).execute()
            Stock.update(quantity=Stock.quantity - 1).where(Stock.sku == sku).execute()
    except IntegrityError:
        return
