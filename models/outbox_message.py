"""The ledger of this application: which messages are owed."""

from __future__ import annotations

from middleware import tables

from .database import database


class OutboxMessage(tables.OutboxMessage):
    """One row for each message that is owed and not done; the columns are those of `middleware.tables`."""

    class Meta:
        database = database
