"""Dead letters are rows that hold what a person needs, whatever the message holds."""

from __future__ import annotations

import json
import logging
from io import StringIO
from threading import Event
from typing import TYPE_CHECKING, Any

import pytest
from dramatiq import Message

from .letters import expect_nothing_left, letters, owe, put, raw_of, the_letter
from .processes import eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dramatiq import Actor

    from .ledger_stage import LedgerStage

pytest_plugins = ("tests.ledger_stage", "tests.relay_fixtures")


@pytest.fixture
def fails(ledger: LedgerStage) -> Actor[..., Any]:
    """An actor that fails for good, but for one label."""

    @ledger.actor(max_retries=0)
    def fails(label: Any = None, **more: Any) -> None:
        if label != "good":
            raise ValueError("no")
        ledger.effect(label)

    return fails


@pytest.fixture
def logged() -> Iterator[StringIO]:
    """What Dramatiq logs, by the handler that its command line has; pytest's own bears less."""
    logger, text = logging.getLogger("dramatiq"), StringIO()
    handler = logging.StreamHandler(text)
    logger.addHandler(handler)
    logger.propagate = False
    yield text
    logger.propagate = True
    logger.removeHandler(handler)


def test_a_dead_letter_holds_all_that_is_known(ledger: LedgerStage) -> None:
    # Given an actor that fails twice and has one retry
    @ledger.actor(
        consumer_name="shop.write", queue_name="other", max_retries=1, min_backoff=10, max_backoff=10
    )
    def write(label: str, *, copies: int) -> None:
        raise LookupError(f"no room for {copies} of {label}")

    began = ledger.sql("SELECT clock_timestamp()")[0][0]

    # When its message was performed in vain
    with ledger.worker_and_relay():
        sent = ledger.send(write.message_with_options(args=("a",), kwargs={"copies": 2}, color="red"))
        letter = the_letter(ledger)

    # Then one row says which message it was
    assert letter["message_id"] == sent.message_id
    assert letter["consumer_name"] == "shop.write"
    assert letter["actor_name"] == "write"
    assert letter["queue_name"] == "other"
    assert json.loads(letter["arguments"]) == {"args": ["a"], "kwargs": {"copies": 2}}
    assert json.loads(letter["options"])["color"] == "red"
    assert Message.decode(bytes(letter["message"])).args == ("a",)

    # And why and when it died
    assert letter["reason"] == "no retry left"
    assert letter["error_class"] == "LookupError"
    assert "no room for 2 of a" in letter["error_text"]
    assert 'raise LookupError(f"no room' in letter["traceback"]
    assert (letter["attempt"], letter["attempts"]) == (1, 2)
    assert abs(letter["sent_at"].timestamp() - sent.message_timestamp / 1_000) < 0.01
    assert began < letter["died_at"] < ledger.sql("SELECT clock_timestamp()")[0][0]


def test_what_cannot_be_decoded_is_kept_byte_by_byte(ledger: LedgerStage, fails: Actor[..., Any]) -> None:
    # Given bytes that are no message
    raw = b"\x00\xff\xfe no message"

    # When they are fetched
    with ledger.worker():
        put(ledger, raw)
        letter = the_letter(ledger)

    # Then the dead letter has them, its queue, and what is wrong with them
    assert bytes(letter["message"]) == raw
    assert letter["queue_name"] == "default"
    assert letter["message_id"] is letter["actor_name"] is letter["arguments"] is None
    assert "decode" in letter["error_text"]


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


#: Fields that are legal to send and hard to store (T13).
HARD: dict[str, dict[str, Any]] = {
    "NUL": {"args": ["a\0b"], "kwargs": {"k\0": "\0"}, "options": {"note": "\0"}},
    "lone surrogates": {"args": ["\ud800"], "kwargs": {"\udfff": "\ud800"}, "options": {"note": "\udc00"}},
    "no numbers": {"args": [float("nan")], "options": {"note": [float("inf"), -float("inf")]}},
    "huge numbers": {"args": [10**300], "options": {"note": 1e308}},
    "deep": {"args": [nested(200)]},
    "huge text": {"args": ["x" * 3_000_000], "options": {"note": "y" * 1_000_000}},
    "escapes": {"args": ["\\u0000 \\ud800 \\"], "options": {"note": "%s %(x)s {0} $1 '; --"}},
    "a moment that is none": {"message_timestamp": float("nan")},
    "a moment too late": {"message_timestamp": 1e300},
    "a moment before time": {"message_timestamp": -1e15},
}


@pytest.mark.parametrize("what", HARD)
@pytest.mark.usefixtures("logged")
def test_a_dead_letter_can_be_stored_whatever_its_message_holds_t13(
    ledger: LedgerStage, fails: Actor[..., Any], what: str
) -> None:
    # Given a message with contents that neither jsonb nor text can take as they are
    message = fails.message("a")
    raw = raw_of(message, **HARD[what])
    owe(ledger, message, raw)

    # When it fails for good
    with ledger.worker_and_relay(threads=1):
        letter = the_letter(ledger)

        # Then its bytes, its arguments and its options are there
        assert bytes(letter["message"]) == raw
        assert letter["message_id"] == message.message_id
        assert (letter["reason"], letter["error_class"]) == ("no retry left", "ValueError")
        assert letter["attempts"] == 1
        assert letter["arguments"]
        assert letter["options"]

        # And the thread takes the next message (I8)
        ledger.send(fails.message("good"))
        ledger.expect_settled()
    assert ledger.effects() == ["good"]


#: Errors that are hard to write down.
class SpeechlessError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("nothing to say")


class WrongTypeError(Exception):
    def __str__(self) -> str:
        return 7  # type: ignore[return-value] # noqa: PLE0307 - that is what is wrong


def chained() -> Exception:
    """An error that has a thousand causes."""
    error = ValueError("the first")
    for number in range(1_000):
        error, error.__cause__ = ValueError(number), error
    return error


ERRORS: dict[str, Callable[[], BaseException]] = {
    "NUL": lambda: ValueError("a\0b"),
    "lone surrogate": lambda: ValueError("\ud800"),
    "huge text": lambda: ValueError("x" * 5_000_000),
    "its text raises": lambda: SpeechlessError("a"),
    "its text is none": lambda: WrongTypeError("a"),
    "no text": ValueError,
    "a group": lambda: ExceptionGroup("a\0b", [ValueError("\ud800"), SpeechlessError()]),
    "a thousand causes": chained,
    "no Exception": lambda: SystemExit("a"),
}


@pytest.mark.parametrize("what", ERRORS)
@pytest.mark.usefixtures("logged")
def test_a_dead_letter_can_be_stored_whatever_its_error_says_t13(ledger: LedgerStage, what: str) -> None:
    # Given a body that raises an error which is hard to write down
    @ledger.actor(max_retries=0)
    def write(label: str) -> None:
        if label == "bad":
            error = ERRORS[what]()
            raise error
        ledger.effect(label)

    # When it is performed
    with ledger.worker_and_relay(threads=1):
        sent = ledger.send(write.message("bad"))
        letter = the_letter(ledger)

        # Then the dead letter has the class of the error
        assert letter["message_id"] == sent.message_id
        assert (letter["reason"], letter["error_class"]) == ("no retry left", type(ERRORS[what]()).__name__)

        # And the thread takes the next message (I8)
        ledger.send(write.message("good"))
        ledger.expect_settled()
    assert ledger.effects() == ["good"]


@pytest.mark.usefixtures("logged")
def test_arguments_nested_to_any_depth_are_one_dead_letter_t13(
    ledger: LedgerStage, fails: Actor[..., Any]
) -> None:
    """Python's limit is met while the message is decoded, compared, failed or written down."""
    # Given messages around that limit
    depths = range(900, 1_010, 3)
    text = raw_of(fails.message("HERE")).decode()
    raws = [text.replace('"HERE"', "[" * depth + "]" * depth).encode() for depth in depths]

    # When they are performed
    with ledger.worker(threads=1):
        put(ledger, *raws)
        eventually(lambda: len(letters(ledger)) >= len(raws), 30, what=lambda: len(letters(ledger)))
        ledger.expect_settled()

    # Then each is dead once
    assert sorted(bytes(letter["message"]) for letter in letters(ledger)) == sorted(raws)


def test_a_dead_letter_waits_for_a_postgresql_that_is_away_i9(ledger: LedgerStage) -> None:
    # Given an actor without a transaction, which fails for good while PostgreSQL is away
    running, go_on, runs = Event(), Event(), list[str]()

    @ledger.actor(idempotency="off", max_retries=0)
    def write(label: str) -> None:
        runs.append(label)
        running.set()
        go_on.wait(20)
        raise ValueError("no")

    with ledger.worker(threads=1):
        sent = write.send("a")
        assert running.wait(10)
        ledger.servers.postgres.stop()
        ledger.hang_up()
        go_on.set()
        eventually(lambda: ledger.broker.guard.outage.lasts)
        put(ledger, b"no message")

        # When it is back
        ledger.servers.postgres.start()

        # Then there is the dead letter, and that of bytes that came meanwhile
        eventually(lambda: len(letters(ledger)) == 2, 20)
        expect_nothing_left(ledger)
    assert {letter["message_id"] for letter in letters(ledger)} == {sent.message_id, None}
    assert runs == ["a"]


def test_a_dead_letter_that_its_table_does_not_take_is_stored_in_a_form_that_fits(
    ledger: LedgerStage, fails: Actor[..., Any]
) -> None:
    # Given a table with a limit of its own
    ledger.sql("ALTER TABLE dead_letters ADD CHECK (length(arguments) < 100)")

    # When a message fails for good whose letter is beyond it
    with ledger.worker_and_relay(threads=1):
        sent = ledger.send(fails.message("x" * 1_000))
        letter = the_letter(ledger)

        # Then its bytes are there, and why there is no more
        assert bytes(letter["message"]) == sent.encode()
        assert letter["message_id"] == sent.message_id
        assert letter["reason"] == "cannot be stored"
        assert "check constraint" in letter["error_text"]

        # And the thread takes the next message (I8)
        ledger.send(fails.message("good"))
        ledger.expect_settled()
    assert ledger.effects() == ["good"]
