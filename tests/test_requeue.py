"""`manage.py dead-letters requeue`: once more, under its own key, in one transaction."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from dramatiq import Message, Worker

from actors import broker, notify_customer, reserve_stock
from models import DeadLetter, Order, OrderState, ProcessedMessage, Stock, database

from .burials import bury, owed, run
from .processes import eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from .servers import Servers


@pytest.fixture(autouse=True)
def _tables(clean: Servers) -> Iterator[None]:
    yield
    clean.start()
    database.close()


def commit_key(message: Message[Any]) -> None:
    """Another delivery does the work of a message."""
    ProcessedMessage.insert(
        consumer_name=message.actor_name,
        message_id=message.message_id,
        performed_by=message.message_id,
        payload_digest=b"",
        digest_version=0,
    ).execute()


def test_a_requeued_message_is_owed_again_as_if_it_were_new() -> None:
    # Given a dead letter with the traces of its attempts
    traces = {"retries": 3, "traceback": "Traceback", "requeue_timestamp": 1, "eta": 1, "color": "red"}
    message = reserve_stock.message(1)._replace(options=traces)
    old = message._replace(message_timestamp=1, queue_name="default.DQ")
    letter = bury(old)

    # When it is requeued
    result = run("requeue", str(letter.id), "--json")

    # Then it is owed above its last attempt, and no longer dead
    assert result.exit_code == 0
    assert json.loads(result.output)["outcome"] == "requeued"
    assert DeadLetter.select().count() == 0
    ((message_id, attempt, anew),) = owed()
    assert (message_id, attempt) == (message.message_id, 4)

    # And its retries and its age begin anew, all else stays
    assert anew.options == {"color": "red"}
    assert (anew.args, anew.queue_name) == ((1,), "default")
    now_ms = database.execute_sql("SELECT extract(epoch FROM now()) * 1000").fetchone()[0]
    assert 0 <= now_ms - anew.message_timestamp < 60_000


def test_a_requeued_message_takes_effect_once_and_not_where_it_did_meanwhile(clean: Servers) -> None:
    # Given two orders whose messages are dead, the second of which was done meanwhile
    Stock.create(sku="SKU-1", quantity=10)
    orders = [Order.create(sku="SKU-1", quantity=2, customer="Ada") for _ in range(2)]
    messages = [reserve_stock.message(order.id) for order in orders]
    letters = [bury(message) for message in messages]
    commit_key(messages[1])

    # When both are requeued, and a worker is there
    assert run("requeue", *(str(letter.id) for letter in letters)).exit_code == 0
    worker = Worker(broker, worker_threads=1, worker_timeout=50)
    worker.start()
    try:
        eventually(lambda: not owed() and not broker.do_qsize("default"), what=owed)
    finally:
        worker.stop()

    # Then the first took effect, and the second did not take effect twice
    states = [Order.get_by_id(order.id).state for order in orders]
    assert states == [OrderState.RESERVED, OrderState.PLACED]
    assert Stock.get_by_id("SKU-1").quantity == 8


def test_requeueing_is_one_transaction() -> None:
    # Given a ledger that cannot be written to
    letter = bury()
    database.execute_sql("ALTER TABLE outbox_messages RENAME TO away")
    try:
        # When one is requeued, then that fails with a sentence
        result = run("requeue", str(letter.id))
        assert result.exit_code == 1
        assert "PostgreSQL says" in result.output
    finally:
        database.execute_sql("ALTER TABLE away RENAME TO outbox_messages")

    # And it is still there
    assert DeadLetter.select().count() == 1


def test_a_message_that_is_owed_a_later_attempt_is_not_set_back() -> None:
    # Given a message that is dead, and owed by a later attempt
    letter = bury()
    assert broker.ledger is not None
    broker.ledger.owe_again(7, Message.decode(bytes(letter.message)), 0)

    # When it is requeued
    assert run("requeue", str(letter.id)).exit_code == 0

    # Then that attempt stands
    assert [attempt for _, attempt, _ in owed()] == [8]


def test_one_that_escaped_its_transaction_needs_to_be_forced() -> None:
    # Given one whose effect may stand without a key, and another
    escaped, other = bury(error_class="TransactionEscaped"), bury(notify_customer.message(1))

    # When both are requeued
    result = run("requeue", str(escaped.id), str(other.id))

    # Then the first is refused with a reason, and the other is owed
    assert result.exit_code == 1
    assert "its effect may stand without a key" in result.output
    assert [message_id for message_id, _, _ in owed()] == [other.message_id]

    # And with force it is owed too
    assert run("requeue", str(escaped.id), "--force").exit_code == 0
    assert len(owed()) == 2


#: What cannot be sent again, by what is wrong with it.
UNFIT: dict[str, Callable[[Message[Any]], bytes]] = {
    "bytes": lambda _: b"\xff\x00",
    "a list": lambda _: b"[]",
    "no options": lambda message: json.dumps(message.asdict() | {"options": None}).encode(),
    "no actor": lambda message: json.dumps(message.asdict() | {"actor_name": None}).encode(),
    "a queue that is none": lambda message: json.dumps(message.asdict() | {"queue_name": 5}).encode(),
    "a NUL": lambda message: json.dumps(message.asdict() | {"message_id": "a\0b"}).encode(),
    "a surrogate": lambda message: json.dumps(message.asdict() | {"message_id": "\ud800"}).encode(),
    "too deep": lambda message: message.encode().replace(b"[1]", b"[" * 990 + b"]" * 990),
}


@pytest.mark.parametrize("what", UNFIT)
def test_one_that_cannot_be_sent_is_refused_with_a_sentence_and_stays(what: str) -> None:
    # Given one that no worker can work with, and another
    message = reserve_stock.message(1)
    unfit, other = bury(message, UNFIT[what](message)), bury(notify_customer.message(1))

    # When both are requeued
    result = run("requeue", str(unfit.id), str(other.id))

    # Then the first stays, and the reader hears why; the other is owed
    assert result.exit_code == 1
    assert f"Dead letter {unfit.id} cannot be sent" in result.output
    assert [letter.id for letter in DeadLetter.select()] == [unfit.id]
    assert [message_id for message_id, _, _ in owed()] == [other.message_id]


def test_requeueing_does_not_need_redis(clean: Servers) -> None:
    # Given a Redis that is away
    letter = bury()
    clean.redis.stop()

    # When one is requeued, then it is owed
    assert run("requeue", str(letter.id)).exit_code == 0
    assert len(owed()) == 1
