"""Everything that waits, waits in PostgreSQL: delays, retries, and what arrives with a time of its own."""

from __future__ import annotations

import json
from time import time
from typing import TYPE_CHECKING, Any

import dramatiq
import pytest
from dramatiq import Actor, Message, Middleware
from dramatiq.brokers.redis import RedisBroker
from dramatiq.middleware import CurrentMessage, SkipMessage

from .processes import eventually

if TYPE_CHECKING:
    from .ledger_stage import LedgerStage

pytest_plugins = ("tests.stage", "tests.ledger_stage")

LATER_MS = 60_000


@pytest.fixture
def write(ledger: LedgerStage) -> Actor[..., Any]:
    """An actor whose effect is its label."""

    @ledger.actor()
    def write(label: str) -> None:
        ledger.effect(label)

    return write


def put(ledger: LedgerStage, raw: bytes, redis_id: str, queue: str = "default") -> None:
    """Put bytes into a queue, as anybody may who speaks to Redis."""
    ledger.redis.hset(f"stage:{queue}.msgs", redis_id, raw)
    ledger.redis.rpush(f"stage:{queue}", redis_id)


def encoded(message: Message[Any], **options: Any) -> bytes:
    """A message as JSON with these options."""
    return json.dumps({**message.asdict(), "options": options}).encode()


# Clocks


def test_every_time_that_is_stored_has_a_time_zone(ledger: LedgerStage) -> None:
    # When the columns that hold a time are looked up
    columns = ledger.sql(
        "SELECT table_name, column_name, data_type FROM information_schema.columns "
        "WHERE table_schema = 'stage' AND (data_type LIKE 'timestamp%%' OR column_name LIKE '%%\\_at')"
    )

    # Then each is a moment, wherever the server and its clients think they are
    assert {(table, name) for table, name, _ in columns} == {
        ("processed_messages", "processed_at"),
        ("processed_messages", "sent_at"),
        ("outbox_messages", "due_at"),
        ("outbox_messages", "sent_at"),
        ("outbox_messages", "published_at"),
        ("dead_letters", "sent_at"),
        ("dead_letters", "died_at"),
        ("barriers", "created_at"),
        ("ticks", "ticked_at"),
    }
    assert {kind for *_, kind in columns} == {"timestamp with time zone"}


def test_a_due_time_is_counted_by_the_clock_of_the_database(
    ledger: LedgerStage, write: Actor[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a sender whose clock is a day ahead
    monkeypatch.setattr("time.time", lambda: time() + 86_400)

    # When it sends with a delay
    ledger.send(write.message("a"), delay=LATER_MS)

    # Then that is counted from the database's now
    assert 45 < ledger.row().due_in_s <= 60


# Retries


def test_a_retry_waits_as_a_row_that_is_due_after_dramatiqs_back_off(ledger: LedgerStage) -> None:
    # Given an actor that fails, once through the ledger and once past it
    @ledger.actor(min_backoff=40_000, max_backoff=40_000)
    def fails(label: str) -> None:
        raise ValueError(label)

    with ledger.worker_and_relay():
        messages = [ledger.send(fails.message("a")), fails.send("b")]

        # When it has failed
        eventually(lambda: [row.attempt for row in ledger.rows()] == [1, 1])
        eventually(lambda: ledger.in_redis() == [])

    # Then both wait in PostgreSQL, with what Retries wrote into them, and nowhere else
    assert ledger.owed() == sorted(message.message_id for message in messages)
    for row in ledger.rows():
        assert not row.published
        assert 10 < row.due_in_s <= 40  # Dramatiq's back-off has a jitter of a half
        assert row.message.options["retries"] == 1
        assert "ValueError" in row.message.options["traceback"]
    assert ledger.redis.keys("stage:default.DQ*") == []


def test_a_retry_asked_for_with_a_delay_is_due_after_it(ledger: LedgerStage) -> None:
    # Given an actor that asks for a retry in an hour
    @ledger.actor(max_backoff=10)
    def later(label: str) -> None:
        raise dramatiq.errors.Retry(delay=3_600_000)

    # When it has run
    with ledger.worker_and_relay():
        ledger.send(later.message("a"))
        eventually(lambda: [row.attempt for row in ledger.rows()] == [1])

    # Then its row is due in an hour, and one retry is spent
    assert 3_500 < ledger.row().due_in_s <= 3_600
    assert ledger.row().message.options["retries"] == 1


def test_retries_come_at_their_time_and_the_delay_queue_is_never_used(ledger: LedgerStage) -> None:
    # Given an actor that fails three times, each time with one more retry
    seen: list[tuple[int, Any]] = []

    @ledger.actor(min_backoff=10, max_backoff=20)
    def fails(label: str) -> None:
        message = CurrentMessage.get_current_message()
        assert message is not None
        seen.append((message.options.get("retries", 0), ledger.redis.keys("*.DQ*")))
        if len(seen) <= 3:
            raise ValueError(label)
        ledger.effect(label)

    ledger.broker.add_middleware(CurrentMessage())

    # When it is performed
    with ledger.worker_and_relay():
        ledger.send(fails.message("a"))
        eventually(ledger.effects)
        ledger.expect_settled()

    # Then Redis never had a delay queue
    assert seen == [(0, []), (1, []), (2, []), (3, [])]


def test_a_middleware_that_sends_again_and_skips_keeps_the_message_owed_t29(ledger: LedgerStage) -> None:
    # Given a middleware that puts off what comes for the first time, as a rate limiter does
    class PutsOff(Middleware):
        def before_process_message(self, broker: Any, message: Any) -> None:
            if "put_off" not in message.options:
                message.options["put_off"] = True
                broker.enqueue(message, delay=50)
                raise SkipMessage

    ledger.broker.add_middleware(PutsOff())

    @ledger.actor()
    def write(label: str) -> None:
        ledger.effect(label)

    # When messages come through the ledger and past it
    with ledger.worker_and_relay():
        ledger.send(write.message("a"))
        write.send("b")

        # Then each takes effect later, once
        eventually(lambda: ledger.effects() == ["a", "b"])
        ledger.expect_settled()


@pytest.mark.parametrize("delay", [None, 50])
def test_a_message_that_an_off_actor_enqueues_again_is_owed(ledger: LedgerStage, delay: int | None) -> None:
    # Given an actor without a key that sends its own message again until it has run three times
    @ledger.actor(idempotency="off")
    def polls(label: str) -> None:
        ledger.effect(label)
        if len(ledger.effects()) < 3:
            message = CurrentMessage.get_current_message()
            assert message is not None
            ledger.broker.enqueue(message, delay=delay)

    ledger.broker.add_middleware(CurrentMessage())

    # When its message comes through the ledger
    with ledger.worker_and_relay():
        ledger.send(polls.message("a"))

        # Then it ran three times, and is owed no longer
        eventually(lambda: len(ledger.effects()) == 3, what=ledger.rows)
        ledger.expect_settled()
    assert ledger.letters() == []


# What arrives with a time of its own (T39)


@pytest.fixture
def stock(ledger: LedgerStage, write: Actor[..., Any]) -> RedisBroker:
    """A producer of Dramatiq's own in the same namespace."""
    return RedisBroker(client=ledger.redis, namespace="stage")


def test_what_a_stock_producer_delays_becomes_a_row_t39(
    ledger: LedgerStage, write: Actor[..., Any], stock: RedisBroker
) -> None:
    # Given messages that a stock RedisBroker has delayed
    stock.enqueue(write.message("soon"), delay=500)
    later = stock.enqueue(write.message("later"), delay=LATER_MS)
    assert len(ledger.messages("delayed")) == 2

    # When a worker meets them
    with ledger.worker_and_relay():
        eventually(lambda: later.message_id in ledger.owed())

        # Then the one runs when it is due, and the other waits as a row that is due then
        eventually(lambda: ledger.effects() == ["soon"])
        eventually(lambda: ledger.owed() == [later.message_id])
        eventually(lambda: ledger.in_redis() == [])
    row = ledger.row()
    assert 40 < row.due_in_s <= LATER_MS / 1_000
    assert (row.queue_name, row.message.queue_name) == ("default", "default")
    assert "eta" not in row.message.options


def test_a_worker_that_stops_holds_nothing_that_is_due_later_t39(
    ledger: LedgerStage, write: Actor[..., Any], stock: RedisBroker
) -> None:
    # Given a worker that met a delayed message
    stock.enqueue(write.message("a"), delay=LATER_MS)
    with ledger.worker():
        eventually(ledger.rows)

        # When it is there, it has nothing in memory or in hand
        eventually(lambda: ledger.messages("delayed") == [])

    # Then nothing of it is left in Redis
    assert ledger.redis.keys("stage:default*") == []


def test_a_retry_of_an_older_version_keeps_its_count_t39(ledger: LedgerStage) -> None:
    # Given what a worker without a ledger left in the delay queue: the last retry of a message
    @ledger.actor(max_retries=3, min_backoff=10)
    def fails(label: str) -> None:
        raise ValueError(label)

    message = fails.message("a")
    put(ledger, encoded(message, retries=3, eta=int(time() * 1_000) - 5_000), "old", "default.DQ")

    # When a worker of ours meets it
    with ledger.worker_and_relay():
        eventually(ledger.letters)
        ledger.expect_settled()

    # Then it was the last
    assert ledger.letter().message_id == message.message_id
    assert ledger.letter().attempts == 4


def test_an_eta_in_an_ordinary_queue_is_kept_t39(ledger: LedgerStage, write: Actor[..., Any]) -> None:
    # Given a message with an eta where no stock worker would look for one, and one without behind it
    put(ledger, encoded(write.message("later"), eta=int(time() * 1_000) + LATER_MS), "1")
    put(ledger, encoded(write.message("now")), "2")

    # When a worker fetches both
    with ledger.worker_and_relay():
        eventually(lambda: ledger.effects() == ["now"])
        eventually(ledger.rows)

    # Then the one waits
    assert 40 < ledger.row().due_in_s <= 60


@pytest.mark.parametrize("queue", ["default", "default.DQ"])
@pytest.mark.parametrize(
    "eta", ["tomorrow", None, True, [], -5, float("nan"), float("inf"), 1e30, 10**400], ids=repr
)
def test_an_eta_that_is_no_time_is_one_dead_letter_or_one_effect_and_holds_up_nobody_t13(
    ledger: LedgerStage, write: Actor[..., Any], eta: object, queue: str
) -> None:
    # Given a message with such an eta, before a good one and one that is delayed
    put(ledger, encoded(write.message("odd"), eta=eta), "1", queue)
    put(ledger, encoded(write.message("delayed"), eta=5), "2", queue)
    put(ledger, write.message("good").encode(), "3")

    # When a worker fetches them
    with ledger.worker_and_relay():
        eventually(lambda: {"delayed", "good"} <= set(ledger.effects()))
        ledger.expect_settled()

    # Then it has ended in one way
    assert ledger.effects().count("odd") + len(ledger.letters()) == 1


@pytest.mark.parametrize("message_id", ["a\0b", "\ud800", "é" * 3_000], ids=["NUL", "surrogate", "long"])
@pytest.mark.parametrize("options", [{"eta": 5}, {}], ids=["delayed", "plain"])
@pytest.mark.parametrize("idempotency", ["transaction", "off"])
def test_an_id_that_no_row_can_hold_is_one_dead_letter_and_holds_up_nobody_t13(
    ledger: LedgerStage, message_id: str, options: dict[str, Any], idempotency: str
) -> None:
    # Given one thread, an actor that fails, and a message with such an id before others
    @ledger.actor(idempotency=idempotency)
    def fails(label: str) -> None:
        ledger.effect(label)
        if label == "odd":
            raise ValueError(label)

    odd = fails.message("odd")._replace(message_id=message_id)
    put(ledger, encoded(odd, **options), "1")
    put(ledger, encoded(fails.message("delayed"), eta=5), "2")
    put(ledger, fails.message("good").encode(), "3")

    # When they are performed
    with ledger.worker_and_relay(threads=1):
        eventually(lambda: {"delayed", "good"} <= set(ledger.effects()))
        ledger.expect_settled()

    # Then it is one dead letter that holds what came
    assert ledger.letter().message == encoded(odd, **options)


def test_what_arrives_while_the_database_is_away_becomes_a_row_when_it_is_back_t39(
    ledger: LedgerStage, write: Actor[..., Any], stock: RedisBroker
) -> None:
    # Given a worker without a database
    with ledger.worker_and_relay():
        ledger.servers.postgres.stop()

        # When a delayed message and one that nobody can read arrive
        later = stock.enqueue(write.message("later"), delay=LATER_MS)
        put(ledger, b"\xff\x00", "1")
        eventually(lambda: len(ledger.messages("delayed")) + len(ledger.raw("in_hand")) == 2)

        # Then both are kept, and are rows when it is back
        ledger.servers.postgres.start()
        ledger.hang_up()
        eventually(lambda: ledger.owed() == [later.message_id], 20)
        eventually(lambda: [letter.message for letter in ledger.letters()] == [b"\xff\x00"])
        eventually(lambda: ledger.redis.keys("stage:default*") == [])
