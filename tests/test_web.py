"""The orders API, through Flask's client and through gunicorn."""

from __future__ import annotations

import subprocess
import sys
from contextlib import closing
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from dramatiq import Message
from peewee import InternalError

from actors import broker
from models import Order, OrderState, OutboxMessage, Stock, database
from web import create_app

from .processes import eventually
from .servers import PROJECT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from flask.testing import FlaskClient
    from werkzeug.test import TestResponse

    from .payment_service import PaymentService
    from .processes import WorkerProcess
    from .servers import Servers

pytest_plugins = ("tests.payment_service",)

ORDER = {"sku": "SKU-1", "quantity": 2, "customer": "someone@example.org"}


@pytest.fixture(autouse=True)
def _stock(clean: Servers) -> Iterator[None]:
    with closing(database):
        Stock.create(sku="SKU-1", quantity=5)
    yield
    database.close()


@pytest.fixture
def client() -> FlaskClient:
    """A client of the application; what the application raises, it raises."""
    app = create_app()
    app.testing = True
    return app.test_client()


def owed() -> list[Message[Any]]:
    """The messages that are rows."""
    return [Message.decode(bytes(row.message)) for row in OutboxMessage.select()]


def messages() -> list[Message[Any]]:
    """What is owed, and what waits in the queue already."""
    payloads: Any = broker.client.hvals(f"{broker.namespace}:default.msgs")
    return owed() + [Message.decode(payload) for payload in payloads]


def test_an_order_is_stored_together_with_its_message(client: FlaskClient) -> None:
    # When an order is placed
    answer = client.post("/orders", json=ORDER)

    # Then the answer says which it is
    order = Order.get()
    assert answer.status_code == 202
    assert answer.json == {"id": order.id, "state": "placed"}
    assert (order.sku, order.quantity, order.customer) == tuple(ORDER.values())

    # And one message asks for its stock, as a row of the same commit
    (message,) = messages()
    assert (message.actor_name, message.args) == ("reserve_stock", (order.id,))
    assert transaction_of("orders") == transaction_of("outbox_messages")


def transaction_of(table: str) -> object:
    """The number of the transaction that wrote the only row of a table."""
    return database.execute_sql(f"SELECT xmin::text FROM {table}").fetchone()


def test_no_message_leaves_for_an_order_that_was_not_committed(client: FlaskClient) -> None:
    # Given a database that refuses orders at their commit
    database.execute_sql("""
        CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS
            $$ BEGIN RAISE EXCEPTION 'refused at the commit'; END $$;
        CREATE CONSTRAINT TRIGGER refuse AFTER INSERT ON orders
            DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION refuse();
    """)
    try:
        # When an order is placed
        with pytest.raises(InternalError, match="refused at the commit"):
            client.post("/orders", json=ORDER)

        # Then it is not stored, and nothing was sent
        assert Order.select().count() == 0
        assert messages() == []
    finally:
        database.execute_sql("DROP FUNCTION refuse CASCADE")


def error_of(answer: TestResponse) -> str:
    """The sentence of an answer that refuses."""
    assert answer.json is not None
    sentence: str = answer.json["error"]
    return sentence


@pytest.mark.parametrize(
    ("change", "status", "sentence"),
    [
        ({"sku": "SKU-11"}, 422, "no article with the SKU 'SKU-11'"),
        ({"sku": ""}, 400, "sku must be"),
        ({"sku": 1}, 400, "sku must be"),
        ({"customer": None}, 400, "customer must be"),
        ({"customer": "a\0b"}, 400, "customer must not contain a NUL"),
        ({"customer": "\ud800"}, 400, "customer must not contain"),
        ({"quantity": 0}, 400, "quantity must be"),
        ({"quantity": "2"}, 400, "quantity must be"),
        ({"quantity": True}, 400, "quantity must be"),
        ({"quantity": 1.5}, 400, "quantity must be"),
        ({"quantity": 2**31}, 400, "quantity must be"),
    ],
    ids=repr,
)
def test_what_is_no_order_is_refused_with_a_sentence(
    client: FlaskClient, change: dict[str, object], status: int, sentence: str
) -> None:
    # When something is posted that cannot be ordered
    answer = client.post("/orders", json={**ORDER, **change})

    # Then the answer says what is wrong with it
    assert answer.status_code == status
    assert sentence in error_of(answer)

    # And nothing was stored or sent
    assert Order.select().count() == 0
    assert messages() == []


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"SKU-1"', b"null"])
def test_a_body_that_is_no_json_object_is_refused_with_a_sentence(client: FlaskClient, body: bytes) -> None:
    # When it is posted
    answer = client.post("/orders", data=body, content_type="application/json")

    # Then it is refused in words
    assert answer.status_code == 400
    assert error_of(answer)


def test_an_unknown_path_is_answered_in_json(client: FlaskClient) -> None:
    # When something else is asked for
    answer = client.get("/order")

    # Then the answer has the form of all the others
    assert answer.status_code == 404
    assert error_of(answer)


@pytest.mark.parametrize("change", [{}, {"sku": "SKU-11"}], ids=["stored", "refused"])
def test_no_request_leaves_its_connection_open(client: FlaskClient, change: dict[str, object]) -> None:
    # When a request has ended
    client.post("/orders", json={**ORDER, **change})

    # Then this thread has no connection
    assert database.is_closed()


def test_an_order_placed_at_gunicorn_is_shipped_by_a_worker(
    tmp_path: Path, service: PaymentService, worker_process: Callable[..., WorkerProcess]
) -> None:
    # Given a worker, and the application behind gunicorn
    worker_process(module="actors")
    socket = tmp_path / "web"
    with subprocess.Popen(
        [
            *(sys.executable, "-m", "gunicorn", "web:app"),
            *("--bind", f"unix:{socket}", "--no-control-socket"),
        ],
        cwd=PROJECT,
        stderr=subprocess.DEVNULL,
    ) as gunicorn:
        try:
            eventually(socket.exists)
            # Between bind and listen the socket is there and refuses.
            transport = httpx.HTTPTransport(uds=str(socket), retries=5)
            with httpx.Client(base_url="http://web", transport=transport) as browser:
                # When an order is placed
                answer = browser.post("/orders", json=ORDER)
        finally:
            gunicorn.terminate()
    assert answer.status_code == 202

    # Then its stock is reserved, and it is shipped
    eventually(lambda: Order.get_by_id(answer.json()["id"]).state == OrderState.SHIPPED)
    assert Stock.get_by_id("SKU-1").quantity == 3


def test_an_order_can_be_placed_while_redis_is_away_i7(
    client: FlaskClient, servers: Servers, worker_process: Callable[..., WorkerProcess]
) -> None:
    # Given a Redis that is away
    servers.redis.stop()

    # When an order is placed
    answer = client.post("/orders", json=ORDER)

    # Then it is stored, and its message is owed
    assert answer.status_code == 202
    assert [message.actor_name for message in owed()] == ["reserve_stock"]

    # And when Redis is back it is reserved
    servers.redis.start()
    worker_process(module="actors")
    eventually(lambda: Order.get().state == OrderState.RESERVED)
