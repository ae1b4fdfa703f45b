"""The ticks of this application: how far its periodic actors have come."""

from __future__ import annotations

from middleware import tables

from .database import database


class Tick(tables.Tick):
    """One row for each periodic actor; the columns are those of `middleware.tables`."""

    class Meta:
        database = database
