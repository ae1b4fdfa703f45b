"""Redis is away: what is sent inside a transaction waits for it, what is sent outside is refused."""

from __future__ import annotations

import os
import signal
from threading import Event
from time import monotonic
from typing import TYPE_CHECKING, Any

import dramatiq
import pytest
from dramatiq import Actor
from dramatiq.errors import BrokerConnectionError

from middleware import DurableRedisBroker

from .processes import eventually

if TYPE_CHECKING:
    from collections.abc import Callable

    from .ledger_stage import LedgerStage

pytest_plugins = ("tests.stage", "tests.ledger_stage")


@pytest.fixture
def write(ledger: LedgerStage) -> Actor[..., Any]:
    """An actor whose effect is its label."""

    @ledger.actor()
    def write(label: str) -> None:
        ledger.effect(label)

    return write


def test_sends_inside_a_transaction_succeed_and_leave_when_redis_is_back_i7(
    ledger: LedgerStage, write: Actor[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    # Given a worker and a relay, and Redis away
    with ledger.worker_and_relay():
        ledger.servers.redis.stop()

        # When transactions send messages
        for label in ("a", "b"):
            with ledger.database.atomic():
                ledger.effect(f"change {label}")
                write.send(label)

        # Then they commit, and what they sent is owed
        assert ledger.effects() == ["change a", "change b"]
        assert len(ledger.owed()) == 2

        # And it takes effect when Redis is back, without anybody's help
        ledger.servers.redis.start()
        eventually(lambda: ledger.effects() == ["a", "b", "change a", "change b"], 20, what=ledger.rows)
        ledger.expect_settled()
    assert caplog.text.count("Redis cannot be used") <= 2  # said, and not at every try


def test_an_undelayed_send_outside_raises_dramatiqs_connection_error(
    ledger: LedgerStage, write: Actor[..., Any]
) -> None:
    # Given Redis away
    ledger.servers.redis.stop()

    # When a message is sent outside a transaction, or past the ledger
    sends: list[Callable[[], object]] = [
        lambda: write.send("a"),
        lambda: write.send_with_options(args=("a",), outbox=False),
    ]
    for send in sends:
        # Then the sender hears of it: Dramatiq calls this class ConnectionError too
        with pytest.raises(BrokerConnectionError):
            send()
    assert ledger.rows() == []


def test_a_send_past_the_ledger_that_fails_does_not_spoil_the_transaction(
    ledger: LedgerStage, write: Actor[..., Any]
) -> None:
    ledger.servers.redis.stop()
    # Given a transaction whose message at once cannot be sent
    with ledger.database.atomic():
        with pytest.raises(BrokerConnectionError):
            write.send_with_options(args=("a",), outbox=False)
        # When it falls back to the ledger
        sent = write.send("a")

    # Then it is owed
    assert ledger.owed() == [sent.message_id]


def test_a_delayed_send_outside_succeeds(ledger: LedgerStage, write: Actor[..., Any]) -> None:
    # When a message is sent with a delay while Redis is away
    ledger.servers.redis.stop()
    sent = write.send_with_options(args=("a",), delay=60_000)

    # Then it is owed, and due later
    assert ledger.owed() == [sent.message_id]


def test_a_redis_that_hangs_does_not_hold_up_a_commit(ledger: LedgerStage, write: Actor[..., Any]) -> None:
    # Given a Redis that accepts connections and answers nothing
    os.kill(ledger.servers.redis.pid, signal.SIGSTOP)
    try:
        # When a transaction sends a message
        began_s = monotonic()
        sent = ledger.send(write.message("a"))

        # Then it commits long before a client would give up (4 s)
        assert monotonic() - began_s < 2
    finally:
        os.kill(ledger.servers.redis.pid, signal.SIGCONT)
    assert ledger.owed() == [sent.message_id]


def test_a_process_that_knows_no_redis_can_send_inside_transactions(ledger: LedgerStage) -> None:
    # Given a broker that nobody told where Redis is
    broker = DurableRedisBroker(url=None, ledger=ledger.models())

    def write(label: str) -> None:
        raise NotImplementedError(label)

    declare: Any = dramatiq.actor
    actor: Actor[..., Any] = declare(write, broker=broker)

    # When it sends in a transaction and with a delay
    with ledger.database.atomic():
        first = actor.send("a")
    second = actor.send_with_options(args=("b",), delay=1)

    # Then both are owed
    assert ledger.owed() == sorted([first.message_id, second.message_id])


def test_a_retry_and_a_dead_letter_need_no_redis_t9(ledger: LedgerStage) -> None:
    # Given bodies that fail after Redis went away
    begun, go_on = Event(), Event()

    @ledger.actor()
    def fails(label: str) -> None:
        begun.set()
        assert go_on.wait(10)
        raise ValueError(label)

    with ledger.relay(), ledger.worker(threads=2):
        retried = ledger.send(fails.message("retried"))
        dead = ledger.send(fails.message_with_options(args=("dead",), max_retries=0))
        assert begun.wait(10)
        eventually(lambda: len(ledger.messages("in_hand")) == 2)
        ledger.servers.redis.stop()

        # When they fail
        go_on.set()

        # Then the retry and the dead letter are rows at once
        eventually(ledger.letters)
        eventually(lambda: [row.attempt for row in ledger.rows()] == [1])
        assert ledger.letter().message_id == dead.message_id
        assert ledger.owed() == [retried.message_id]

        # And what Redis had in hand is acknowledged when it is back
        ledger.servers.redis.start()
        eventually(lambda: ledger.in_redis() == [], 20)
    assert ledger.owed() == [retried.message_id]
