"""Every night the day before is counted."""

from __future__ import annotations

from datetime import UTC, datetime, time, timedelta

import dramatiq
from dramatiq.middleware import CurrentMessage
from peewee import SQL, fn

from models import DailyReport, Order, Shipment

from .broker import broker


@dramatiq.actor(broker=broker, periodic="0 3 * * *")
def daily_report() -> None:
    """Count what was placed and shipped on the day before the tick; without a tick, yesterday. In UTC."""
    message = CurrentMessage.get_current_message()
    tick = message.options.get("tick") if message is not None else None
    moment = datetime.fromisoformat(tick) if tick else datetime.now(UTC)
    day = moment.date() - timedelta(days=1)
    begin = datetime.combine(day, time(), UTC)
    end = begin + timedelta(days=1)
    shipped, revenue_cents = (
        Shipment.select(fn.count(SQL("*")), fn.coalesce(fn.sum(Order.amount_cents), 0))
        .join(Order)
        .where((Shipment.shipped_at >= begin) & (Shipment.shipped_at < end))
        .scalar(as_tuple=True)
    )
    placed = Order.select().where((Order.created_at >= begin) & (Order.created_at < end)).count()
    figures = {"placed": placed, "shipped": shipped, "revenue_cents": revenue_cents, "made_at": fn.now()}
    DailyReport.insert(day=day, **figures).on_conflict(
        conflict_target=[DailyReport.day], update=figures
    ).execute()
