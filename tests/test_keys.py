"""Which key a delivery has, and what happens to a key that cannot be one (T13)."""

from __future__ import annotations

import secrets
import string
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from dramatiq.brokers.redis import RedisBroker

from middleware.errors import InvalidKey

from .processes import eventually

if TYPE_CHECKING:
    from dramatiq import Message

    from .stage import Stage

pytest_plugins = ("tests.stage",)

INVALID = {
    "empty": "",
    "NUL": "a\x00b",
    "lone surrogate": "a\ud800",
    "513 bytes": "x" * 513,
    "514 bytes in 257 letters": "é" * 257,
    "3,000 at random": "".join(secrets.choice(string.ascii_letters) for _ in range(3_000)),
}
NO_STRINGS = {"none": None, "number": 5, "list": ["a"], "bool": True}
VALID = {
    "one letter": "a",
    "a space": " ",
    "quotes": 'it\'s "that" \\x',
    "512 bytes": "x" * 512,
    "512 bytes at random": "".join(secrets.choice(string.printable) for _ in range(512)),
    "512 bytes in 128 signs": "🂡" * 128,
}


def enqueue_from_elsewhere(stage: Stage, message: Message[Any]) -> None:
    """Enqueue as a producer that knows nothing of keys: with Dramatiq's own broker."""
    stock = RedisBroker(url=stage.servers.redis.url, namespace="stage", middleware=[])
    stock.declare_queue("default")
    stock.enqueue(message)
    stock.client.close()


def with_key(message: Message[Any], key: Any) -> Message[Any]:
    return replace(message, options={**message.options, "idempotency_key": key})


def test_a_business_key_stands_for_all_messages_that_carry_it_i1(stage: Stage) -> None:
    # Given an actor
    @stage.actor()
    def pay(amount: int) -> str:
        stage.effect(f"paid {amount}")
        return "receipt 1"

    # When two messages carry one business key
    with stage.worker():
        first = pay.send_with_options(args=(10,), idempotency_key="order-1")
        stage.expect_in_redis()
        pay.send_with_options(args=(10,), idempotency_key="order-1")
        eventually(lambda: len(stage.seen("returned")) == 2)
        stage.expect_in_redis()

    # Then the first did the work, and the second was answered with its result (I5)
    assert stage.effects() == ["paid 10"]
    row = stage.sql("SELECT consumer_name, message_id, performed_by, result FROM processed_messages")
    assert row == [("pay", "order-1", first.message_id, "receipt 1")]
    assert [seen.outcome for seen in stage.seen("returned")] == ["receipt 1", "receipt 1"]


def test_one_business_key_is_a_key_of_each_consumer(stage: Stage) -> None:
    # Given two actors
    @stage.actor()
    def pay(order: str) -> None:
        stage.effect(f"paid {order}")

    @stage.actor()
    def ship(order: str) -> None:
        stage.effect(f"shipped {order}")

    # When each gets a message with the same business key
    with stage.worker():
        pay.send_with_options(args=("1",), idempotency_key="order-1")
        ship.send_with_options(args=("1",), idempotency_key="order-1")
        stage.expect_in_redis()

    # Then both take effect
    assert stage.effects() == ["paid 1", "shipped 1"]
    assert stage.key_rows() == [("pay", "order-1"), ("ship", "order-1")]


def test_a_consumer_name_outlives_the_name_of_its_function_i1(stage: Stage) -> None:
    # Given a consumer whose function was renamed
    @stage.actor(consumer_name="payments")
    def pay(order: str) -> None:
        stage.effect(f"paid {order}")

    @stage.actor(consumer_name="payments")
    def pay_order(order: str) -> None:
        stage.effect(f"paid {order} again")

    # When a message for the old name comes again for the new one
    with stage.worker():
        message = pay.send("1")
        stage.expect_in_redis()
        stage.broker.enqueue(replace(message, actor_name="pay_order"))
        eventually(lambda: len(stage.seen("returned")) == 2)

    # Then it is a duplicate
    assert stage.effects() == ["paid 1"]
    assert stage.key_rows() == [("payments", message.message_id)]


def test_a_key_that_was_used_for_another_payload_is_a_dead_letter_at_once(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    # Given a business key that was used
    @stage.actor()
    def pay(amount: int) -> None:
        stage.effect(f"paid {amount}")

    with stage.worker():
        first = pay.send_with_options(args=(10,), idempotency_key="order-1")
        stage.expect_in_redis()
        # When it comes with another payload
        other = pay.send_with_options(args=(20,), idempotency_key="order-1")
        stage.expect_in_redis(dead=[other])

    # Then nothing is done, no retry is spent, and the log names the key and both messages
    assert stage.effects() == ["paid 10"]
    assert stage.key_rows() == [("pay", "order-1")]
    assert "retries" not in stage.only("dead").options
    for name in ("order-1", first.message_id, other.message_id, "other arguments"):
        assert name in caplog.text


def test_an_actor_may_answer_another_payload_with_the_stored_result(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    # Given an actor that wants it so
    @stage.actor(on_mismatch="answer")
    def pay(amount: int) -> str:
        stage.effect(f"paid {amount}")
        return f"receipt over {amount}"

    # When a key comes with another payload
    with stage.worker():
        pay.send_with_options(args=(10,), idempotency_key="order-1")
        stage.expect_in_redis()
        pay.send_with_options(args=(20,), idempotency_key="order-1")
        eventually(lambda: len(stage.seen("returned")) == 2)
        stage.expect_in_redis()

    # Then it is a duplicate, and the log tells of the difference
    assert stage.effects() == ["paid 10"]
    assert {seen.outcome for seen in stage.seen("returned")} == {"receipt over 10"}
    assert "other arguments" in caplog.text


def test_the_order_of_keyword_arguments_makes_no_other_payload(stage: Stage) -> None:
    # Given an actor
    @stage.actor()
    def pay(**details: Any) -> None:
        stage.effect("paid")

    # When a key comes with the same arguments in another order
    with stage.worker():
        pay.send_with_options(kwargs={"a": 1, "b": {"c": 2, "d": 3}}, idempotency_key="order-1")
        stage.expect_in_redis()
        pay.send_with_options(kwargs={"b": {"d": 3, "c": 2}, "a": 1}, idempotency_key="order-1")
        eventually(lambda: len(stage.seen("returned")) == 2)
        stage.expect_in_redis()

    # Then it is a duplicate
    assert stage.effects() == ["paid"]


@pytest.mark.parametrize("key", [*INVALID.values(), *NO_STRINGS.values()], ids=[*INVALID, *NO_STRINGS])
def test_an_invalid_business_key_is_refused_where_it_is_sent_t13(stage: Stage, key: Any) -> None:
    # Given an actor
    @stage.actor()
    def pay(amount: int) -> None:
        stage.effect(f"paid {amount}")

    # When a message with such a key is sent
    with pytest.raises(InvalidKey, match=r"idempotency_key .* must be a str of 1 to 512 UTF-8 bytes"):
        pay.send_with_options(args=(10,), idempotency_key=key)

    # Then nothing has left
    assert stage.places() == {}


def test_an_invalid_business_key_is_a_dead_letter_where_it_arrives_t13(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    # Given messages with such keys, sent by somebody who did not check them
    @stage.actor()
    def pay(amount: int) -> None:
        stage.effect(f"paid {amount}")

    invalid = [with_key(pay.message(10), key) for key in (*INVALID.values(), *NO_STRINGS.values())]
    for message in invalid:
        enqueue_from_elsewhere(stage, message)

    # When they are delivered
    with stage.worker():
        stage.expect_in_redis(dead=invalid)

    # Then none is performed, none has spent a retry, and each reason is in the log
    assert stage.stored() == ([], [])
    assert {message.options.get("retries", 0) for message in stage.messages("dead")} == {0}
    for reason in ("is empty", "contains NUL", "a lone surrogate", "has 513 bytes", "NoneType", "bool"):
        assert reason in caplog.text


def test_an_invalid_message_id_is_a_dead_letter_and_the_thread_goes_on_i8_t13(stage: Stage) -> None:
    # Given messages with such ids, with and without a valid business key
    @stage.actor()
    def pay(amount: int) -> None:
        stage.effect(f"paid {amount}")

    invalid = [replace(pay.message(10), message_id=message_id) for message_id in INVALID.values()]
    for message in invalid:
        enqueue_from_elsewhere(stage, message)
        enqueue_from_elsewhere(stage, with_key(message, "order-1"))
    pay.send(20)

    # When they are delivered, to the only thread
    with stage.worker(threads=1):
        stage.expect_in_redis(dead=[*invalid, *invalid])

    # Then none is performed, and the thread has taken the next one
    assert stage.effects() == ["paid 20"]
    assert {message.options.get("retries", 0) for message in stage.messages("dead")} == {0}


def test_any_other_text_is_a_business_key_t13(stage: Stage) -> None:
    # Given consumers with as long names
    def pay(key: str) -> None:
        stage.effect(key)

    # When two messages carry each key
    for key in VALID.values():
        actor = stage.actor(actor_name=f"pay {key}", consumer_name=key)(pay)
        for _ in range(2):
            actor.send_with_options(args=(key,), idempotency_key=key)
    with stage.worker():
        eventually(lambda: len(stage.seen("returned")) == 2 * len(VALID))
        stage.expect_in_redis()

    # Then each is stored as it is, and one message took effect for each
    assert stage.key_rows() == [(key, key) for key in sorted(VALID.values())]
    assert stage.effects() == sorted(VALID.values())


def test_a_retry_keeps_its_business_key_i1(stage: Stage) -> None:
    # Given an actor that fails once
    attempts: list[int] = []

    @stage.actor(min_backoff=20, max_backoff=20)
    def pay(amount: int) -> None:
        stage.effect(f"paid {amount}")
        attempts.append(amount)
        if len(attempts) == 1:
            raise ValueError("not yet")

    # When a message with a business key is retried, and sent again afterwards
    with stage.worker():
        pay.send_with_options(args=(10,), idempotency_key="order-1")
        eventually(stage.effects)
        pay.send_with_options(args=(10,), idempotency_key="order-1")
        eventually(lambda: len(stage.seen("returned")) == 2)
        stage.expect_in_redis()

    # Then there is one key and one effect
    assert stage.key_rows() == [("pay", "order-1")]
    assert stage.effects() == ["paid 10"]
