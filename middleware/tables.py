"""The columns and constraint names of Onetake's tables, as abstract peewee models.

An application makes them concrete on its own database, all at once with ``tables.on(database)``, or
one by one::

    class ProcessedMessage(tables.ProcessedMessage):
        class Meta:
            database = database
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import peewee

if TYPE_CHECKING:
    from datetime import datetime

#: Only a conflict with this constraint means "duplicate" (I4, T12).
KEY_CONSTRAINT = "processed_messages_key"

#: One obligation for each message and actor; a retry replaces it (section "ledger" of the design).
OWED_CONSTRAINT = "outbox_messages_key"

#: What the relay asks for: what waits for its time, and what is on its way.
OUTBOX_INDEXES = {
    "due": "(due_at) WHERE published_at IS NULL",
    "published": "(published_at) WHERE published_at IS NOT NULL",
    "parent": "USING hash (parent_id) WHERE parent_id IS NOT NULL",
}
#: By hash: what is no valid message id may be of any size (T13).
DEAD_LETTER_INDEXES = {
    "message_id": "USING hash (message_id)",
    "parent": "USING hash (parent_id) WHERE parent_id IS NOT NULL",
}
#: For whoever asks what became of a message. Only those pay that were set off by another message, or
#: carry a business key.
INBOX_INDEXES = {
    "parent": "USING hash (parent_id) WHERE parent_id IS NOT NULL",
    "performer": "USING hash (performed_by) WHERE performed_by <> message_id",
}


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
      parent_id: the message that set this one off, and sent_at: when; both as the ledger knew them,
        NULL for a message that came from no row of it.
    """

    consumer_name = peewee.TextField()
    message_id = peewee.TextField()
    performed_by = peewee.TextField()
    payload_digest = peewee.BlobField()
    digest_version = peewee.SmallIntegerField()
    result = JSONBField(null=True)
    processed_at = TimestampTZField(constraints=[peewee.SQL("DEFAULT now()")])
    parent_id = peewee.TextField(null=True)
    sent_at = TimestampTZField(null=True)

    class Meta:
        primary_key = False
        # peewee hands down this one, not `table_name`; a concrete model may still set its own.
        table_function = _processed_messages
        constraints: ClassVar[list[Any]] = [
            peewee.SQL(f"CONSTRAINT {KEY_CONSTRAINT} UNIQUE (consumer_name, message_id)")
        ]


def _outbox_messages(_model: type[peewee.Model]) -> str:
    return "outbox_messages"


def _dead_letters(_model: type[peewee.Model]) -> str:
    return "dead_letters"


class OutboxMessage(peewee.Model):
    """The ledger: one row for each message that is owed and not yet done.

    The transaction that inserts a message's key deletes its row, so the table holds exactly what
    is still to do; Redis is a means of transport.

    Columns:
      message_id, actor_name: which message this is; unique over both.
      queue_name: where it is published.
      attempt: counted up by each retry; nothing replaces or deletes a row of a higher one.
      message: the encoded message.
      due_at: not before; sent_at: since when. Both by the database's clock.
      published_at: when it was last given to Redis, NULL while it waits.
      refused: why Redis could not take it when it was last tried, NULL otherwise.
      parent_id: the message that set this one off, NULL where none did.
    """

    message_id = peewee.TextField()
    actor_name = peewee.TextField()
    queue_name = peewee.TextField()
    attempt = peewee.IntegerField(constraints=[peewee.SQL("DEFAULT 0")])
    message = peewee.BlobField()
    due_at = TimestampTZField(constraints=[peewee.SQL("DEFAULT clock_timestamp()")])
    sent_at = TimestampTZField(constraints=[peewee.SQL("DEFAULT clock_timestamp()")])
    published_at = TimestampTZField(null=True)
    refused = peewee.TextField(null=True)
    parent_id = peewee.TextField(null=True)

    class Meta:
        primary_key = False
        table_function = _outbox_messages
        constraints: ClassVar[list[Any]] = [
            peewee.SQL(f"CONSTRAINT {OWED_CONSTRAINT} UNIQUE (message_id, actor_name)")
        ]


class DeadLetter(peewee.Model):
    """A message that failed for good, until somebody requeues or discards it.

    Columns:
      id: the row's own.
      message_id, consumer_name, actor_name, queue_name: whose it was, as far as could be read.
      arguments, options: as JSON in ASCII, NULL where the bytes could not be decoded.
      message: the bytes as they came.
      reason: why in a few words; error_class, error_text, traceback: the last error.
      attempt: of its row in the ledger; attempts: how often its body ran.
      sent_at: when the sender made it, by his clock; died_at: by the database's.
      parent_id: the message that set this one off, as far as the ledger knew.
    """

    id = peewee.BigAutoField()
    message_id = peewee.TextField(null=True)
    consumer_name = peewee.TextField(null=True)
    actor_name = peewee.TextField(null=True)
    queue_name = peewee.TextField()
    arguments = peewee.TextField(null=True)
    options = peewee.TextField(null=True)
    message = peewee.BlobField()
    reason = peewee.TextField()
    error_class = peewee.TextField(null=True)
    error_text = peewee.TextField(null=True)
    traceback = peewee.TextField(null=True)
    attempt = peewee.IntegerField()
    attempts = peewee.IntegerField()
    sent_at = TimestampTZField(null=True)
    died_at = TimestampTZField(constraints=[peewee.SQL("DEFAULT clock_timestamp()")])
    parent_id = peewee.TextField(null=True)

    class Meta:
        table_function = _dead_letters


def _barriers(_model: type[peewee.Model]) -> str:
    return "barriers"


class Barrier(peewee.Model):
    """What a group with completion callbacks waits for (T25).

    Columns:
      barrier_id: derived from the members, so that a group that is run twice has one barrier.
      waiting: how many members are not done; the one that makes it 0 sends the callbacks.
      callbacks: the encoded completion callbacks.
      created_at: when the group was run, by the database's clock.
    """

    barrier_id = peewee.TextField(primary_key=True)
    waiting = peewee.IntegerField()
    callbacks = peewee.BlobField()
    created_at = TimestampTZField(constraints=[peewee.SQL("DEFAULT now()")])

    class Meta:
        table_function = _barriers


def _barrier_members(_model: type[peewee.Model]) -> str:
    return "barrier_members"


class BarrierMember(peewee.Model):
    """A member of a group that is not done: its own transaction deletes the row and counts it.

    Columns:
      message_id: the member, for a pipeline its last step; barrier_id: which `Barrier` waits for it.
    """

    message_id = peewee.TextField()
    barrier_id = peewee.TextField()

    class Meta:
        primary_key = peewee.CompositeKey("message_id", "barrier_id")
        table_function = _barrier_members


def _ticks(_model: type[peewee.Model]) -> str:
    return "ticks"


class Tick(peewee.Model):
    """The latest tick of a periodic actor for which a message was written.

    Columns:
      consumer_name: the actor's stable name.
      expression: by which the tick was found, its time zone included.
      ticked_at: the tick.
    """

    consumer_name = peewee.TextField(primary_key=True)
    expression = peewee.TextField()
    ticked_at = TimestampTZField()

    class Meta:
        table_function = _ticks


class Tables(NamedTuple):
    """The concrete models of an application."""

    ProcessedMessage: type[ProcessedMessage]
    OutboxMessage: type[OutboxMessage]
    DeadLetter: type[DeadLetter]
    Barrier: type[Barrier]
    BarrierMember: type[BarrierMember]
    Tick: type[Tick]


def on(database: peewee.Database, *, schema: str | None = None) -> Tables:
    """All models on a database, made concrete.

    Arguments:
      database: a `Database` of this package.
      schema: where the tables are; None: where the search_path finds them.
    """
    meta = type("Meta", (), {"database": database, "schema": schema})
    kinds = (ProcessedMessage, OutboxMessage, DeadLetter, Barrier, BarrierMember, Tick)
    return Tables(*(type(kind.__name__, (kind,), {"Meta": meta}) for kind in kinds))
