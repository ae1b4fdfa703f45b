"""What is stored, and what the database refuses to store."""

from __future__ import annotations

from contextlib import closing
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
from peewee import IntegrityError, Model

from models import (
    DeadLetter,
    Order,
    OrderState,
    OutboxMessage,
    ProcessedMessage,
    Stock,
    database,
    load_sample_data,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .servers import Servers


@pytest.fixture(autouse=True)
def _connection(clean: Servers) -> Iterator[None]:
    with closing(database):
        yield


def place(**columns: object) -> Order:
    """Store an order; what is not said is an ordinary one."""
    order: Order = Order.create(**{"sku": "SKU-1", "quantity": 1, "customer": "Ada", **columns})
    return order


@pytest.mark.parametrize("model", [DeadLetter, Order, OutboxMessage, ProcessedMessage, Stock])
def test_every_model_names_the_columns_of_its_table(model: type[Model]) -> None:
    # Given the migrated table, when its columns are listed
    columns = database.get_columns(model._meta.table_name)

    # Then the model has the same, and knows which may be NULL
    assert {column.name: column.null for column in columns} == {
        field.column_name: field.null for field in model._meta.sorted_fields
    }


def test_the_stock_of_an_article_never_falls_below_zero() -> None:
    # Given one piece in stock
    Stock.create(sku="SKU-1", quantity=1)

    # When two are taken, then the database refuses
    with pytest.raises(IntegrityError, match="stock_quantity_not_negative"):
        Stock.update(quantity=Stock.quantity - 2).execute()

    # And the piece is still there
    assert Stock.get_by_id("SKU-1").quantity == 1


def test_half_of_each_page_of_the_stock_is_free_for_updates() -> None:
    # Given the migrated table, when its options are read
    options = database.execute_sql("SELECT reloptions FROM pg_class WHERE oid = 'stock'::regclass").fetchone()

    # Then it has its fillfactor
    assert options == (["fillfactor=50"],)


def test_a_new_order_is_placed_and_has_a_time_with_its_zone() -> None:
    # Given an article
    Stock.create(sku="SKU-1", quantity=1)

    # When an order is stored that says nothing about state and time
    order = Order.get_by_id(place().id)

    # Then both are set
    assert order.state == OrderState.PLACED
    assert order.created_at.utcoffset() is not None
    assert timedelta(0) <= database_now() - order.created_at < timedelta(minutes=1)
    assert order.reserved_at is None


def database_now() -> object:
    """The time by the database's clock."""
    return database.execute_sql("SELECT clock_timestamp()").fetchone()[0]


@pytest.mark.parametrize(
    ("columns", "constraint"),
    [
        ({"sku": "SKU-unknown"}, "orders_sku_fkey"),
        ({"quantity": 0}, "orders_quantity_positive"),
        ({"state": "lost"}, "orders_state_known"),
    ],
)
def test_an_order_that_cannot_be_is_refused(columns: dict[str, object], constraint: str) -> None:
    # Given an article
    Stock.create(sku="SKU-1", quantity=1)

    # When an impossible order is stored, then the database refuses
    with pytest.raises(IntegrityError, match=constraint):
        place(**columns)


@pytest.mark.parametrize("state", OrderState)
def test_every_state_of_an_order_can_be_stored(state: OrderState) -> None:
    # Given an article
    Stock.create(sku="SKU-1", quantity=1)

    # When an order is stored in a state
    order = place(state=state)

    # Then it comes back in it
    assert OrderState(Order.get_by_id(order.id).state) is state


def test_sample_data_may_be_loaded_again_without_refilling_the_stock() -> None:
    # Given sample data from which something was taken
    assert load_sample_data() == 10
    Stock.update(quantity=7).where(Stock.sku == "SKU-3").execute()
    Stock.delete().where(Stock.sku == "SKU-10").execute()

    # When it is loaded again
    added = load_sample_data()

    # Then only what was absent is added
    assert added == 1
    stock = {article.sku: article.quantity for article in Stock.select()}
    assert set(stock) == {f"SKU-{number}" for number in range(1, 11)}
    assert stock.pop("SKU-3") == 7
    assert len(set(stock.values())) == 1
