"""The barriers of this application: what its groups with completion callbacks wait for."""

from __future__ import annotations

from middleware import tables

from .database import database


class Barrier(tables.Barrier):
    """One row for each group; the columns are those of `middleware.tables`."""

    class Meta:
        database = database


class BarrierMember(tables.BarrierMember):
    """One row for each member that is not done; the columns are those of `middleware.tables`."""

    class Meta:
        database = database
