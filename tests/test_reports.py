"""The nightly report: what was placed and shipped on the day before its tick."""

from __future__ import annotations

from contextlib import closing
from datetime import UTC, date, datetime, timedelta
from typing import TYPE_CHECKING

import pytest
from dramatiq import Worker

from actors import broker, daily_report
from models import DailyReport, Order, OutboxMessage, Shipment, Stock, database

from .processes import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .servers import Servers

DAY = date(2026, 3, 1)


@pytest.fixture(autouse=True)
def _worker(clean: Servers) -> Iterator[None]:
    with closing(database):
        Stock.create(sku="SKU-1", quantity=5)
        worker = Worker(broker, worker_timeout=100, worker_threads=1)
        worker.start()
        yield
        worker.stop()


def sell(placed_at: datetime, shipped_at: datetime | None = None) -> None:
    """Store an order of 7 euros, and its parcel if it was shipped."""
    order = Order.create(sku="SKU-1", quantity=1, customer="Ada", created_at=placed_at, amount_cents=700)
    if shipped_at is not None:
        Shipment.create(order=order, charge_id=1, shipped_at=shipped_at)


def report_of(day: date) -> tuple[int, int, int] | None:
    found = DailyReport.get_or_none(DailyReport.day == day)
    return None if found is None else (found.placed, found.shipped, found.revenue_cents)


def test_the_day_before_the_tick_is_counted_and_no_other() -> None:
    # Given orders at both ends of a day, before and after it
    first, last = datetime(2026, 3, 1, tzinfo=UTC), datetime(2026, 3, 1, 23, 59, 59, 999_999, tzinfo=UTC)
    moment = timedelta(microseconds=1)
    sell(first - moment, first)
    sell(first, last)
    sell(last)
    sell(last + moment, last + moment)

    # When the report of the tick of the next day is made, twice
    for _ in range(2):
        broker.enqueue(daily_report.message_with_options(tick="2026-03-02T03:00:00+00:00"))
        eventually(lambda: report_of(DAY))

    # Then it has what that day had
    eventually(lambda: not OutboxMessage.select().exists() and broker.do_qsize("default") == 0)
    assert report_of(DAY) == (2, 2, 1_400)
    assert DailyReport.select().count() == 1


def test_without_a_tick_it_is_yesterday_and_a_day_without_orders_has_zeros() -> None:
    # When a report is sent by hand
    daily_report.send()

    # Then there is one of yesterday
    eventually(lambda: DailyReport.select().exists())
    assert report_of(datetime.now(UTC).date() - timedelta(days=1)) == (0, 0, 0)
