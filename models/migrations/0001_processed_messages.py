"""The inbox: no primary key and no index besides the constraint that means "duplicate"."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from peewee import Database


def up(_migrator: object, db: Database) -> None:
    db.execute_sql("""
        CREATE TABLE processed_messages (
            consumer_name   text        NOT NULL,
            message_id      text        NOT NULL,
            performed_by    text        NOT NULL,
            payload_digest  bytea       NOT NULL,
            digest_version  smallint    NOT NULL,
            result          jsonb,
            processed_at    timestamptz NOT NULL DEFAULT now(),
            CONSTRAINT processed_messages_key UNIQUE (consumer_name, message_id)
        )
    """)
