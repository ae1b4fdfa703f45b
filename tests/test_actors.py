"""Reserving stock for an order, in a worker of the test's own process."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

import pytest
from dramatiq import Worker

from actors import broker, reserve_stock
from models import Order, OrderState, OutboxMessage, ProcessedMessage, Stock, database

from .processes import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .servers import Servers


@pytest.fixture(autouse=True)
def _worker(clean: Servers) -> Iterator[None]:
    with closing(database):
        Stock.create(sku="SKU-1", quantity=5)
        worker = Worker(broker, worker_timeout=100, worker_threads=2)
        worker.start()
        yield
        worker.stop()


def place(quantity: int) -> Order:
    """Store an order of the article that is in stock."""
    order: Order = Order.create(sku="SKU-1", quantity=quantity, customer="Ada")
    return order


def decided(order: Order) -> Order:
    """Wait until its stock was asked for, and read the order again."""

    def look() -> Order | None:
        read: Order = Order.get_by_id(order.id)
        return read if read.state != OrderState.PLACED else None

    found = eventually(look)
    assert found is not None
    return found


def nothing_is_left() -> bool:
    """Whether no message is owed, waits or is delayed."""
    return OutboxMessage.select().count() == broker.do_qsize("default") == 0


def in_stock() -> int:
    """How many pieces are left."""
    quantity: int = Stock.get_by_id("SKU-1").quantity
    return quantity


def test_an_order_is_reserved_when_its_pieces_are_taken_from_stock() -> None:
    # Given an order of two of five pieces
    order = place(quantity=2)

    # When its message is performed
    reserve_stock.send(order.id)

    # Then it is reserved at its price, and three pieces are left
    order = decided(order)
    assert order.state == OrderState.RESERVED
    assert order.reserved_at >= order.created_at
    assert order.amount_cents == 2_000
    assert in_stock() == 3


def test_an_order_of_the_last_pieces_is_reserved() -> None:
    # Given an order of all five pieces
    order = place(quantity=5)

    # When its message is performed
    reserve_stock.send(order.id)

    # Then it is reserved
    assert decided(order).state == OrderState.RESERVED
    assert in_stock() == 0


def test_an_order_of_more_than_is_left_is_rejected_without_an_error() -> None:
    # Given an order of one piece too many
    order = place(quantity=6)

    # When its message is performed
    reserve_stock.send(order.id)

    # Then it is rejected, nothing was taken, and nothing waits for a retry or sets off more
    order = decided(order)
    assert order.state == OrderState.REJECTED
    assert order.reserved_at is None
    assert in_stock() == 5
    eventually(nothing_is_left)
    assert ProcessedMessage.select().count() == 1


def test_a_message_that_is_delivered_three_times_takes_its_pieces_once() -> None:
    # Given an order, and three copies of its message in the queue
    order = place(quantity=2)
    message = reserve_stock.message(order.id)
    for _ in range(3):
        broker.enqueue(message)

    # When all of them have ended
    decided(order)
    eventually(nothing_is_left)

    # Then the pieces were taken once
    assert in_stock() == 3
    assert ProcessedMessage.select().count() == 1
