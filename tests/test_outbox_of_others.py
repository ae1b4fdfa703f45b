"""What is sent with a transaction of Django, SQLAlchemy, psycopg or asyncpg leaves with its commit."""

from __future__ import annotations

import asyncio
from time import monotonic
from typing import TYPE_CHECKING, Any

import asyncpg
import psycopg
import pytest

from middleware.errors import ConfigurationError, InvalidKey

from .other_libraries import CHANGE, WAYS, for_asyncpg
from .processes import eventually

if TYPE_CHECKING:
    from dramatiq import Actor

    from .ledger_stage import LedgerStage

pytest_plugins = ("tests.stage", "tests.ledger_stage")

#: How often a relay looks, and what a busy machine may add to it.
POLL_S, MARGIN_S = 0.25, 2.0


@pytest.fixture
def write(ledger: LedgerStage) -> Actor[..., Any]:
    """An actor whose effect is its label."""

    @ledger.actor()
    def write(label: str) -> None:
        ledger.effect(label)

    return write


every_way = pytest.mark.parametrize("way", WAYS)


@every_way
def test_a_message_leaves_with_the_commit_of_anybodys_transaction(
    ledger: LedgerStage, write: Actor[..., Any], way: str
) -> None:
    messages = [write.message("a"), write.message("b")]
    with ledger.worker_and_relay():
        # Given a transaction of another library, with a change
        def look() -> None:
            # Then nothing of it is under way before the commit
            assert ledger.effects() == ledger.owed() == ledger.in_redis() == []

        # When messages are sent with it, and it commits
        WAYS[way](ledger, messages, look, commits=True)

        # Then they take effect, once
        eventually(lambda: ledger.effects() == ["a", "b", "change"], what=ledger.effects)
        ledger.expect_settled()


@every_way
def test_a_message_does_not_leave_with_the_roll_back_of_anybodys_transaction_i7(
    ledger: LedgerStage, write: Actor[..., Any], way: str
) -> None:
    # Given a transaction of another library, with a change and a message
    # When it is rolled back
    looked: list[bool] = []
    WAYS[way](ledger, [write.message("a")], lambda: looked.append(True), commits=False)

    # Then there is neither
    assert looked == [True]
    assert ledger.effects() == []
    assert ledger.rows() == []


def test_a_message_of_anybodys_transaction_leaves_with_the_next_poll(
    ledger: LedgerStage, write: Actor[..., Any]
) -> None:
    # Given a relay that nobody wakes
    with ledger.relay():
        write.send("the relay runs")
        message = write.message("a")

        # When another library commits
        WAYS["psycopg 3"](ledger, [message], list, commits=True)
        committed_s = monotonic()
        eventually(lambda: message.message_id in ledger.in_redis())

        # Then the message is in Redis after a poll
        assert monotonic() - committed_s < POLL_S + MARGIN_S


def test_a_wake_up_lets_a_message_of_anybodys_transaction_leave_at_once(
    ledger: LedgerStage, write: Actor[..., Any]
) -> None:
    # Given a relay that only a wake-up lets move, and a message of another library's transaction
    message = write.message("a")
    with ledger.relay(asks=False):
        WAYS["psycopg 3"](ledger, [message], list, commits=True)
        assert ledger.in_redis() == []

        # When the application wakes it
        ledger.broker.wake()

        # Then the message leaves
        eventually(lambda: ledger.in_redis() == [message.message_id])


@pytest.mark.parametrize("way", ["enqueue_on", "format", "numeric"])
def test_a_delay_is_a_due_time_in_anybodys_transaction(
    ledger: LedgerStage, write: Actor[..., Any], way: str
) -> None:
    # When a message is sent with a delay of a minute
    message = write.message("a")
    if way == "numeric":

        async def play() -> None:
            connection = await asyncpg.connect(**for_asyncpg(ledger.url()))
            text, values = ledger.broker.outbox_statement(message, "numeric", 60_000)
            await connection.execute(text, *values)
            await connection.close()

        asyncio.run(play())
    else:
        with psycopg.connect(ledger.url()) as connection:
            if way == "enqueue_on":
                ledger.broker.enqueue_on(connection, message, delay=60_000)
            else:
                text, values = ledger.broker.outbox_statement(message, delay=60_000)
                connection.execute(text.encode(), values)

    # Then it is due in a minute
    assert 45 < ledger.row().due_in_s <= 60


def test_the_same_message_sent_twice_is_owed_once_and_spoils_no_transaction(
    ledger: LedgerStage, write: Actor[..., Any]
) -> None:
    # When a message is sent twice with a transaction
    message = write.message("a")
    WAYS["psycopg 3"](ledger, [message, message], list, commits=True)

    # Then that has committed, and it is owed once
    assert ledger.effects() == ["change"]
    assert ledger.owed() == [message.message_id]


@every_way
def test_a_text_that_looks_like_parameters_arrives_as_it_is(
    ledger: LedgerStage, write: Actor[..., Any], way: str
) -> None:
    # Given arguments that look like parameters of every style
    label = "100 % %s %(x)s $1 :x ? '; DROP TABLE effects; -- \\ \" ü"

    # When they are sent
    with ledger.worker_and_relay():
        WAYS[way](ledger, [write.message(label)], list, commits=True)
        eventually(lambda: label in ledger.effects())

        # Then they have arrived
        ledger.expect_settled()


def test_a_style_that_is_none_is_refused(ledger: LedgerStage, write: Actor[..., Any]) -> None:
    # When the statement is asked for in a style that it does not know, it says which it does
    unknown: Any = "pyformat"
    with pytest.raises(ConfigurationError, match="'format' or 'numeric'"):
        ledger.broker.outbox_statement(write.message("a"), unknown)


def test_a_message_that_no_row_can_hold_is_refused_before_the_statement(
    ledger: LedgerStage, write: Actor[..., Any]
) -> None:
    # Given a transaction of another library
    with psycopg.connect(ledger.url()) as connection:
        connection.execute(CHANGE)

        # When a message with an invalid id, or an invalid key, is sent with it
        with pytest.raises(InvalidKey):
            ledger.broker.enqueue_on(connection, write.message("a")._replace(message_id="a\0b"))
        with pytest.raises(InvalidKey):
            ledger.broker.enqueue_on(connection, write.message_with_options(args=("a",), idempotency_key=""))

    # Then the transaction is none the worse
    assert ledger.effects() == ["change"]
    assert ledger.rows() == []
