"""The columns and constraint names of Onetake's tables, as abstract peewee models.

An application makes them concrete on its own database::

    class ProcessedMessage(tables.ProcessedMessage):
        class Meta:
            database = database
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import peewee

if TYPE_CHECKING:
    from datetime import datetime

#: Only a conflict with this constraint means "duplicate" (I4, T12).
KEY_CONSTRAINT = "processed_messages_key"


class TimestampTZField(peewee.Field):
    """A moment on the database's clock, with its time zone (``timestamptz``)."""

    field_type = "TIMESTAMPTZ"

    def python_value(self, value: datetime | None) -> datetime | None:
        return value


class JSONBField(peewee.Field):
    """A JSON value; psycopg2 hands it back decoded (``jsonb``)."""

    field_type = "JSONB"


def _processed_messages(_model: type[peewee.Model]) -> str:
    return "processed_messages"


class ProcessedMessage(peewee.Model):
    """The inbox: one row for each message that took effect.

    Columns:
      consumer_name: the actor's stable name.
      message_id: the message's id, or its business key where it was sent with one.
      performed_by: the id of the message whose delivery did the work.
      payload_digest: 16 bytes over the arguments (``payload.digest``).
      digest_version: which way of computing the digest; only equal versions are compared.
      result: what the actor returned, NULL where it returned None or stores no result.
      processed_at: when the transaction began, by the database's clock.
    """

    consumer_name = peewee.TextField()
    message_id = peewee.TextField()
    performed_by = peewee.TextField()
    payload_digest = peewee.BlobField()
    digest_version = peewee.SmallIntegerField()
    result = JSONBField(null=True)
    processed_at = TimestampTZField(constraints=[peewee.SQL("DEFAULT now()")])

    class Meta:
        primary_key = False
        # peewee hands down this one, not `table_name`; a concrete model may still set its own.
        table_function = _processed_messages
        constraints: ClassVar[list[Any]] = [
            peewee.SQL(f"CONSTRAINT {KEY_CONSTRAINT} UNIQUE (consumer_name, message_id)")
        ]
