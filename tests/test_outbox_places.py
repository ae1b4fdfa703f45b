"""The one rule holds wherever a message is sent from: web handlers, actors, commands, threads."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from contextlib import closing, contextmanager
from threading import Event
from typing import TYPE_CHECKING, Any

import pytest
from dramatiq import Message

from actors import broker, reserve_stock
from models import Order, OrderState, OutboxMessage, Stock, database
from web import create_app

from .processes import Kind, eventually
from .servers import PROJECT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from flask.testing import FlaskClient

    from .ledger_stage import LedgerStage
    from .processes import WorkerProcess
    from .servers import Servers

pytest_plugins = ("tests.stage", "tests.ledger_stage")

ORDER = {"sku": "SKU-1", "quantity": 2, "customer": "someone@example.org"}


@pytest.fixture
def stock(clean: Servers) -> Iterator[None]:
    """Five pieces of one article."""
    with closing(database):
        Stock.create(sku="SKU-1", quantity=5)
        yield


def owed() -> list[Message[Any]]:
    """What the application owes."""
    return [Message.decode(bytes(row.message)) for row in OutboxMessage.select()]


def in_redis() -> list[Message[Any]]:
    """What waits in the application's queue."""
    payloads: Any = broker.client.hvals(f"{broker.namespace}:default.msgs")
    return [Message.decode(payload) for payload in payloads]


# Web handlers


@pytest.fixture
def client(stock: None) -> FlaskClient:
    """A client of the application with two more handlers; what they raise is answered with 500."""
    app = create_app()

    @app.post("/fails")
    def fails() -> str:
        with database.atomic():
            order = Order.create(**ORDER)
            reserve_stock.send(order.id)
            raise RuntimeError("after the message was sent")

    @app.post("/outside")
    def outside() -> str:
        order = Order.create(**ORDER)
        reserve_stock.send(order.id)
        raise RuntimeError("after both have happened")

    app.logger.disabled = True
    return app.test_client()


def test_a_web_handler_owes_the_message_of_what_it_committed(client: FlaskClient) -> None:
    # When an order is placed
    answer = client.post("/orders", json=ORDER)

    # Then its message is owed, and no Redis was needed for that
    assert answer.status_code == 202
    (message,) = owed()
    assert (message.actor_name, message.args) == ("reserve_stock", (Order.get().id,))
    assert in_redis() == []


def test_a_web_handler_that_fails_in_its_transaction_has_sent_nothing_i7(client: FlaskClient) -> None:
    # When a handler fails after it sent a message in its transaction
    answer = client.post("/fails")

    # Then there is neither order nor message
    assert answer.status_code == 500
    assert Order.select().count() == 0
    assert owed() == in_redis() == []


def test_a_web_handler_that_sends_outside_a_transaction_has_sent_at_once(client: FlaskClient) -> None:
    # When a handler without a transaction fails after it sent a message
    answer = client.post("/outside")

    # Then both stand
    assert answer.status_code == 500
    (message,) = in_redis()
    assert message.args == (Order.get().id,)
    assert owed() == []


# Commands

COMMAND = """
import sys
from actors import reserve_stock
from models import Order, database
with database.atomic():
    order = Order.create(sku="SKU-1", quantity=2, customer="a command")
    reserve_stock.send(order.id)
    print("sent", flush=True)
    if sys.stdin.readline() == "fail\\n":
        sys.exit(1)
"""


@contextmanager
def command() -> Iterator[subprocess.Popen[str]]:
    """A command that has sent a message in its transaction and waits for a word."""
    with subprocess.Popen(
        [sys.executable, "-c", COMMAND], cwd=PROJECT, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "sent\n"
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("end", ["fail\n", "kill"])
def test_a_command_that_does_not_commit_has_sent_nothing_i7(stock: None, end: str) -> None:
    # Given a command that has sent a message in its transaction
    with command() as process:
        # When it fails, or is killed
        if end == "kill":
            process.send_signal(signal.SIGKILL)
        process.communicate(None if end == "kill" else end)

    # Then there is neither order nor message
    assert process.returncode != 0
    eventually(lambda: not OutboxMessage.select().count())
    assert Order.select().count() == 0
    assert in_redis() == []


@pytest.fixture
def relay_process() -> Iterator[None]:
    """`manage.py relay`."""
    with subprocess.Popen(
        [sys.executable, "manage.py", "relay"], cwd=PROJECT, stderr=subprocess.DEVNULL
    ) as process:
        yield
        process.terminate()


@pytest.mark.parametrize("kind", ["threads", "gevent"])
def test_what_a_command_sends_leaves_with_its_commit(
    kind: Kind, stock: None, relay_process: None, worker_process: Callable[..., WorkerProcess]
) -> None:
    # Given a worker, a relay, and a command that has sent a message in its transaction
    worker = worker_process(kind=kind)
    with command() as process:
        # When it commits
        process.communicate("\n")
    assert process.returncode == 0

    # Then its order is reserved
    eventually(lambda: Order.get().state == OrderState.RESERVED, what=worker.output)
    eventually(lambda: owed() == in_redis() == [])


# Actors


def test_what_an_actor_sends_leaves_with_its_commit_and_not_before(ledger: LedgerStage) -> None:
    # Given an actor that sends, and one that it sends to
    sent, go_on = Event(), Event()

    @ledger.actor()
    def write(label: str) -> None:
        ledger.effect(label)

    @ledger.actor()
    def begin() -> None:
        write.send("a")
        sent.set()
        assert go_on.wait(10)

    with ledger.worker_and_relay():
        first = begin.send()
        assert sent.wait(10)

        # When its transaction is open
        # Then nothing of it can be seen
        assert ledger.in_redis() == [first.message_id]
        assert ledger.rows() == []

        # And when it has committed, what it sent takes effect
        go_on.set()
        eventually(ledger.effects)
        ledger.expect_settled()
    assert ledger.effects() == ["a"]


@pytest.mark.parametrize(
    "failure",
    [
        "raise ValueError",
        # A serialisation failure runs the body again at once.
        "DO $$ BEGIN RAISE 'again' USING ERRCODE = '40001'; END $$",
        # A lost connection gives the message back.
        "SELECT pg_terminate_backend(pg_backend_pid())",
    ],
    ids=["exception", "serialisation failure", "lost connection"],
)
def test_what_an_attempt_sent_that_did_not_commit_never_leaves_i7(ledger: LedgerStage, failure: str) -> None:
    # Given an actor that sends, and whose first two attempts do not commit
    attempts: list[int] = []

    @ledger.actor()
    def write(attempt: int) -> None:
        ledger.effect(str(attempt))

    @ledger.actor(min_backoff=10, max_backoff=10)
    def begin() -> None:
        attempts.append(len(attempts) + 1)
        write.send(attempts[-1])
        write.send_with_options(args=(attempts[-1],), delay=1)
        if len(attempts) < 3:
            if failure == "raise ValueError":
                raise ValueError
            ledger.database.execute_sql(failure)

    # When it is performed
    with ledger.worker_and_relay():
        begin.send()
        eventually(lambda: len(ledger.effects()) == 2)
        ledger.expect_settled()

    # Then only what the third sent has left
    assert ledger.effects() == ["3", "3"]


def test_an_actor_that_opted_out_has_no_transaction_so_it_sends_at_once(ledger: LedgerStage) -> None:
    # Given an actor without a transaction that sends and fails, and one with a block of its own
    @ledger.actor()
    def write(label: str) -> None:
        ledger.effect(label)

    @ledger.actor(idempotency="off", max_retries=0)
    def begin() -> None:
        write.send("at once")
        with ledger.database.atomic():
            write.send("in a block")
        with ledger.database.atomic():
            write.send("in a block that fails")
            raise ValueError

    # When it is performed
    with ledger.worker_and_relay():
        begin.send()
        eventually(ledger.letters)
        ledger.expect_settled()

    # Then its failure has called back only the block that failed
    assert ledger.effects() == ["at once", "in a block"]


# Threads and greenlets

#: Of eight senders, every other one commits.
EXPECTED = {
    "meanwhile": [True, [], []],
    "owed": ["0", "2", "4", "6"],
    "effects": ["0", "2", "4", "6"],
}


def test_threads_send_side_by_side_each_with_its_own_transaction(ledger: LedgerStage) -> None:
    from .outbox_scenes import side_by_side

    # Given threads with a transaction each, when half of them commit and one sends outside
    # Then each message leaves as its own thread decided
    assert side_by_side(ledger) == EXPECTED


def test_greenlets_send_side_by_side_each_with_its_own_transaction(clean: Servers) -> None:
    # Given the same in a process that is patched by gevent
    done = subprocess.run(
        [sys.executable, "-m", "tests.outbox_scenes"],
        cwd=PROJECT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    # Then it is no different
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == EXPECTED
