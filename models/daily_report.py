"""What was sold on each day."""

from __future__ import annotations

from peewee import SQL, BigIntegerField, DateField, IntegerField, Model

from middleware.tables import TimestampTZField

from .database import database


class DailyReport(Model):
    """The figures of one day in UTC.

    Columns:
      day: which.
      placed: how many orders were placed; shipped: how many left.
      revenue_cents: what those that left cost.
      made_at: when it was counted, by the database's clock.
    """

    day = DateField(primary_key=True)
    placed = IntegerField()
    shipped = IntegerField()
    revenue_cents = BigIntegerField()
    made_at = TimestampTZField(constraints=[SQL("DEFAULT now()")])

    class Meta:
        database = database
        table_name = "daily_reports"
