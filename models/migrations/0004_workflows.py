"""Workflows: what a group waits for, what set a message off, and how far periodic actors have come."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from peewee import Database


def up(_migrator: object, db: Database) -> None:
    db.execute_sql("""
        CREATE TABLE barriers (
            barrier_id  text        PRIMARY KEY,
            waiting     integer     NOT NULL,
            callbacks   bytea       NOT NULL,
            created_at  timestamptz NOT NULL DEFAULT now()
        )
    """)
    db.execute_sql("""
        CREATE TABLE barrier_members (
            message_id  text NOT NULL,
            barrier_id  text NOT NULL,
            PRIMARY KEY (message_id, barrier_id)
        )
    """)
    db.execute_sql("""
        CREATE TABLE ticks (
            consumer_name  text        PRIMARY KEY,
            expression     text        NOT NULL,
            ticked_at      timestamptz NOT NULL
        )
    """)
    db.execute_sql("""
        ALTER TABLE processed_messages
            ADD COLUMN parent_id text,
            ADD COLUMN sent_at timestamptz
    """)
    for table in ("processed_messages", "outbox_messages", "dead_letters"):
        db.execute_sql(f"ALTER TABLE {table} ADD COLUMN IF NOT EXISTS parent_id text")
        db.execute_sql(
            f"CREATE INDEX {table}_parent ON {table} USING hash (parent_id) WHERE parent_id IS NOT NULL"
        )
    # A message with a business key is found by its own id too.
    db.execute_sql("""
        CREATE INDEX processed_messages_performer ON processed_messages
        USING hash (performed_by) WHERE performed_by <> message_id
    """)
