"""The dead letters of this application: which messages failed for good."""

from __future__ import annotations

from middleware import tables

from .database import database


class DeadLetter(tables.DeadLetter):
    """One row for each message that failed for good; the columns are those of `middleware.tables`."""

    class Meta:
        database = database
