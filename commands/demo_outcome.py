"""What the demo's orders come to, and what was found in the end."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import httpx
from peewee import fn
from rich.table import Table

import settings

from .demo_processes import counted

if TYPE_CHECKING:
    from .demo_troubles import Troubles

ORDERS = 300
#: Each order's first message is delivered so many times.
COPIES = 3
DUPLICATES = (COPIES - 1) * ORDERS

#: What goes wrong with one order of so many: for the payment service, or for the carrier.
REFUSED, NOT_ANSWERED, FAILING, UNDELIVERABLE = 10, 30, 25, 50


def customer(number: int) -> str:
    """The address of a customer, which says what goes wrong (see `payments.behaviour`)."""
    if number % UNDELIVERABLE == UNDELIVERABLE - 1:
        return f"customer-{number}@example.invalid"
    for every, what in ((REFUSED, "refuse"), (NOT_ANSWERED, "timeout"), (FAILING, "fail")):
        if number % every == every // 2:
            return f"customer-{number}+{what}@example.org"
    return f"customer-{number}@example.org"


def _count(text: str) -> int:
    return sum(text in customer(number) for number in range(ORDERS))


CANCELLED_REFUSED = _count("+refuse@")
CANCELLED_UNDELIVERABLE = _count(".invalid")
CANCELLED = CANCELLED_REFUSED + CANCELLED_UNDELIVERABLE
SHIPPED = ORDERS - CANCELLED
#: Reserved, charged, shipped, told. Refused: reserved, released, told. Undeliverable: reserved, charged,
#: refunded, released, told.
EFFECTS = 4 * SHIPPED + 3 * CANCELLED_REFUSED + 5 * CANCELLED_UNDELIVERABLE


def stock() -> int:
    """How many pieces are there of all articles."""
    from models import Stock

    return int(Stock.select(fn.SUM(Stock.quantity)).scalar())


class Finding(NamedTuple):
    """One figure: what it is, what it must be at least and at most, and what it was."""

    what: str
    least: int
    most: int | None
    found: int

    @property
    def is_right(self) -> bool:
        return self.least <= self.found and (self.most is None or self.found <= self.most)

    @property
    def expected(self) -> str:
        if self.most is None:
            return f"at least {self.least}" if self.least else "any"
        return f"{self.least}"


class Outcome:
    """What was found when nothing moved any more; stock is in pieces, money in cents.

    Arguments:
      stock_before: what was in stock before the first order.
    """

    def __init__(self, stock_before: int, troubles: Troubles) -> None:
        from models import OutboxMessage, ProcessedMessage

        counts = counted()
        deliveries = sum(count for name, count in counts.items() if name.startswith("started:"))
        effects = ProcessedMessage.select().where(ProcessedMessage.consumer_name != "daily_report").count()
        self.findings = [
            Finding("deliveries", EFFECTS + DUPLICATES, None, deliveries),
            Finding("in the killed worker's hands", 1, None, troubles.in_hand),
            Finding("lost with Redis: came back out of PostgreSQL", 1, None, troubles.lost_and_owed),
            Finding("lost with Redis: sent again by their sender", 0, None, troubles.lost_and_sent_again),
            Finding("duplicates answered", DUPLICATES, None, counts.get("duplicates", 0)),
            _exactly("effects", EFFECTS, effects),
            *_of_orders(stock_before),
            _exactly("messages still owed", 0, OutboxMessage.select().count()),
        ]

    @property
    def is_exact(self) -> bool:
        """Whether each message took effect once, all adds up, and nothing is owed."""
        return all(finding.is_right for finding in self.findings)

    def table(self) -> Table:
        """The same for a reader."""
        table = Table("", "expected", "found")
        for column in table.columns[1:]:
            column.justify = "right"
        for finding in self.findings:
            mark = "" if finding.is_right else "  <- wrong"
            table.add_row(finding.what, finding.expected, f"{finding.found}{mark}")
        return table


def _exactly(what: str, expected: int, found: int) -> Finding:
    return Finding(what, expected, expected, found)


def _of_orders(stock_before: int) -> list[Finding]:
    """What the shop, and the payment service, know of the orders."""
    from models import DeadLetter, Notification, Order, OrderState, Shipment

    def orders(state: OrderState) -> int:
        return int(Order.select().where(Order.state == state).count())

    shipped = Order.select(fn.SUM(Order.quantity), fn.SUM(Order.amount_cents)).where(
        Order.state == OrderState.SHIPPED
    )
    pieces, cents = shipped.scalar(as_tuple=True)
    charges = httpx.get(f"{settings.PAYMENTS_URL}/charges").raise_for_status().json()
    refunded = sum(charge["refunded"] for charge in charges)
    received = sum(charge["amount_cents"] for charge in charges if not charge["refunded"])
    return [
        _exactly("orders shipped", SHIPPED, orders(OrderState.SHIPPED)),
        _exactly("orders cancelled", CANCELLED, orders(OrderState.CANCELLED)),
        _exactly("pieces in stock", stock_before - (pieces or 0), stock()),
        _exactly("charges", SHIPPED + CANCELLED_UNDELIVERABLE, len(charges)),
        _exactly("charges refunded", CANCELLED_UNDELIVERABLE, refunded),
        _exactly("cents received", cents or 0, received),
        _exactly("shipments", SHIPPED, Shipment.select().count()),
        _exactly("notifications", ORDERS, Notification.select().count()),
        _exactly("dead letters: refused, or undeliverable", CANCELLED, DeadLetter.select().count()),
    ]
