"""The inbox of this application: which messages have taken effect."""

from __future__ import annotations

from middleware import tables

from .database import database


class ProcessedMessage(tables.ProcessedMessage):
    """One row for each message that took effect; the columns are those of `middleware.tables`."""

    class Meta:
        database = database
