"""The business: from an order to its parcel, and back where that fails; each effect once."""

from __future__ import annotations

from contextlib import closing, contextmanager
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

import pytest
from dramatiq import Worker

from actors import broker, fulfil, payments
from middleware.relay import Relay
from models import DeadLetter, Notification, Order, OrderState, OutboxMessage, Shipment, Stock, database

from .processes import eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from .payment_service import PaymentService
    from .processes import Kind, WorkerProcess
    from .servers import Servers

pytest_plugins = ("tests.payment_service",)

IN_STOCK = 10


@pytest.fixture(autouse=True)
def _relay(clean: Servers) -> Iterator[None]:
    """A little stock, and a relay in a thread of this process."""
    assert broker.ledger is not None
    over = Event()
    relay = Thread(target=Relay(broker, broker.ledger).run, args=(over,))
    with closing(database):
        Stock.create(sku="SKU-1", quantity=IN_STOCK, price_cents=250)
        relay.start()
        yield
        over.set()
        broker.wake()
        relay.join()


@contextmanager
def worker() -> Iterator[None]:
    """A worker in this process."""
    worker = Worker(broker, worker_timeout=100, worker_threads=2)
    worker.start()
    try:
        yield
    finally:
        worker.stop()


def place(customer: str = "ada@example.org", quantity: int = 2) -> Order:
    """Place an order as the web application does."""
    with database.atomic():
        order: Order = Order.create(sku="SKU-1", quantity=quantity, customer=customer)
        fulfil(order.id)
    return order


def end_of(*orders: Order, what: Callable[[], object] | str = "") -> list[str]:
    """Wait until each customer was told once and nothing is owed; returns the states of the orders."""

    def is_over() -> bool:
        return Notification.select().count() == len(orders) and not OutboxMessage.select().exists()

    eventually(is_over, 20, what=what)
    told = {one.order_id: one.state for one in Notification.select()}
    states = [Order.get_by_id(order.id).state for order in orders]
    assert [told[order.id] for order in orders] == states
    return states


def in_stock() -> int:
    quantity: int = Stock.get_by_id("SKU-1").quantity
    return quantity


def charged(service: PaymentService) -> list[tuple[int, bool]]:
    """Amount and whether it was refunded, of each charge."""
    return [(one["amount_cents"], one["refunded"]) for one in service.charges()]


def dead() -> list[tuple[Any, Any]]:
    return [(letter.actor_name, letter.error_class) for letter in DeadLetter.select()]


def test_an_order_is_reserved_charged_shipped_and_told_of(service: PaymentService) -> None:
    # Given a worker; when orders are placed, also where the payment service fails once or is slow
    with worker():
        orders = [place(f"ada{asked}@example.org") for asked in ("", "+fail", "+slow")]
        states = end_of(*orders)

    # Then each is shipped and paid once, and two pieces are gone for each
    assert states == [OrderState.SHIPPED] * 3
    assert charged(service) == [(500, False)] * 3
    assert in_stock() == IN_STOCK - 6
    charge_of = {one["reference"]: one["id"] for one in service.charges()}
    assert sorted((one.order_id, one.charge_id) for one in Shipment.select()) == [
        (order.id, charge_of[f"order {order.id}"]) for order in orders
    ]
    assert dead() == []


def test_an_order_of_more_than_is_left_is_rejected_and_costs_nothing(service: PaymentService) -> None:
    # Given a worker; when an order is placed of one piece too many
    with worker():
        states = end_of(place(quantity=IN_STOCK + 1))

    # Then it is rejected without an error, and nothing was taken or charged
    assert states == [OrderState.REJECTED]
    assert (in_stock(), charged(service), Shipment.select().count(), dead()) == (IN_STOCK, [], 0, [])


def test_a_refused_charge_releases_the_stock_and_tells_the_customer(service: PaymentService) -> None:
    # Given a worker; when an order is placed whose charge is refused
    with worker():
        states = end_of(place("ada+refuse@example.org"))

    # Then it is cancelled, all pieces are there, and a dead letter says why
    assert states == [OrderState.CANCELLED]
    assert (in_stock(), charged(service), Shipment.select().count()) == (IN_STOCK, [], 0)
    assert dead() == [("charge", "ChargeRefusedError")]


def test_what_cannot_be_shipped_is_refunded_and_released(service: PaymentService) -> None:
    # Given a worker; when an order is placed that no carrier takes
    with worker():
        states = end_of(place("ada@example.invalid"))

    # Then the money was given back, and the pieces were put back
    assert states == [OrderState.CANCELLED]
    assert (in_stock(), charged(service), Shipment.select().count()) == (IN_STOCK, [(500, True)], 0)
    assert dead() == [("ship", "UndeliverableError")]


def test_a_charge_that_times_out_after_it_was_made_is_made_once(
    service: PaymentService, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # Given a worker that waits 300 ms for an answer; when an order is placed whose charge times out
    monkeypatch.setattr(payments.client, "timeout", 0.3)
    with worker():
        states = end_of(place("ada+timeout@example.org"))

    # Then it was asked for again, and charged once
    assert states == [OrderState.SHIPPED]
    assert "ReadTimeout" in caplog.text
    assert charged(service) == [(500, False)]


@pytest.mark.parametrize("kind", ["threads", "gevent"])
def test_a_worker_that_is_killed_between_the_charge_and_the_commit_charges_once(
    service: PaymentService, worker_process: Callable[..., WorkerProcess], kind: Kind
) -> None:
    # Given a worker that waits for the answer of a service that has charged
    patient = {"PAYMENTS_TIMEOUT_MS": "60000", "HEARTBEAT_TIMEOUT_MS": "1000"}
    first = worker_process(kind=kind, env=patient)
    order = place("ada+timeout@example.org")
    eventually(service.charges, what=first.output)
    assert Order.get_by_id(order.id).state == OrderState.RESERVED

    # When it is killed, and another takes over
    first.kill()
    second = worker_process(kind=kind, env=patient)

    # Then the order is shipped, and was charged once
    assert end_of(order, what=second.output) == [OrderState.SHIPPED]
    assert charged(service) == [(500, False)]
    assert Shipment.select().count() == 1
