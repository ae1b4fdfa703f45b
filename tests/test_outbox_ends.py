"""Every way in which a delivery ends settles the message's row in the ledger (T29).

The names follow the table of `docs/design/endings.md`. A row that stays or is due again is still
owed; any other is gone, and nothing is owed for ever.
"""

from __future__ import annotations

from contextlib import suppress
from threading import Event, Thread
from time import sleep
from typing import TYPE_CHECKING, Any

import peewee
import pytest
from dramatiq import Middleware
from dramatiq.middleware import SkipMessage

from .processes import eventually

if TYPE_CHECKING:
    from collections.abc import Callable

    from .ledger_stage import LedgerStage

pytest_plugins = ("tests.stage", "tests.ledger_stage")

each_kind = pytest.mark.parametrize("idempotency", ["transaction", "off"])


# Done


@each_kind
def test_a_body_that_returns_ends_the_row(ledger: LedgerStage, idempotency: str) -> None:
    # Given an actor, with a key or without
    @ledger.actor(idempotency=idempotency)
    def write(label: str) -> None:
        ledger.effect(label)

    # When its message is performed
    with ledger.worker_and_relay():
        message = ledger.send(write.message("a"))
        eventually(ledger.effects)

        # Then nothing is owed
        ledger.expect_settled()
    assert ledger.done() == ([message.message_id] if idempotency == "transaction" else [])
    assert ledger.letters() == []


def test_a_duplicate_ends_the_row(ledger: LedgerStage) -> None:
    # Given a message that was performed
    @ledger.actor()
    def write(label: str) -> None:
        ledger.effect(label)

    with ledger.worker_and_relay():
        message = ledger.send(write.message("a"))
        eventually(ledger.effects)
        ledger.expect_settled()

        # When it is sent once more, and performed again
        ledger.send(message)
        ledger.expect_settled()

    # Then nothing is owed, and nothing has happened
    assert ledger.effects() == ["a"]
    assert ledger.letters() == []


def test_a_duplicate_of_a_business_key_ends_its_own_row(ledger: LedgerStage) -> None:
    # Given two messages with one business key
    backend = ledger.keep_results()

    @ledger.actor(store_results=True)
    def write(label: str) -> str:
        ledger.effect(label)
        return "the first answer"

    with ledger.worker_and_relay():
        messages = [
            ledger.send(write.message_with_options(args=("a",), idempotency_key="order 1")) for _ in range(2)
        ]

        # When both are performed
        answers = [message.get_result(backend=backend, block=True) for message in messages]
        ledger.expect_settled()

    # Then one took effect, both were answered, and nothing is owed
    assert ledger.effects() == ["a"]
    assert answers == ["the first answer"] * 2


@pytest.mark.parametrize("on_mismatch", ["refuse", "answer"])
def test_another_payload_under_a_key_ends_the_row_with_a_dead_letter_unless_it_is_answered(
    ledger: LedgerStage, on_mismatch: str
) -> None:
    # Given two messages with one business key and different arguments
    @ledger.actor(on_mismatch=on_mismatch)
    def write(label: str) -> None:
        ledger.effect(label)

    with ledger.worker_and_relay():
        ledger.send(write.message_with_options(args=("a",), idempotency_key="order 1"))
        eventually(ledger.effects)

        # When the second is performed
        other = ledger.send(write.message_with_options(args=("b",), idempotency_key="order 1"))
        ledger.expect_settled()

    # Then it is a dead letter, or was answered
    letters = [(letter.message_id, letter.error_class) for letter in ledger.letters()]
    assert letters == ([(other.message_id, "PayloadMismatch")] if on_mismatch == "refuse" else [])
    assert ledger.effects() == ["a"]


@each_kind
def test_a_skip_by_the_actor_ends_the_row(ledger: LedgerStage, idempotency: str) -> None:
    # Given an actor that skips
    @ledger.actor(idempotency=idempotency)
    def skips(label: str) -> None:
        with ledger.database.atomic():
            ledger.effect(label)
            raise SkipMessage(label)

    # When its message is performed
    with ledger.worker_and_relay():
        ledger.send(skips.message("a"))
        ledger.expect_settled()

    # Then there is neither effect nor key nor dead letter
    assert ledger.effects() == ledger.done() == []
    assert ledger.letters() == []


def test_a_skip_by_a_middleware_ends_the_row(ledger: LedgerStage) -> None:
    # Given a middleware that skips everything
    class Skips(Middleware):
        def before_process_message(self, broker: Any, message: Any) -> None:
            raise SkipMessage

    ledger.broker.add_middleware(Skips())

    @ledger.actor()
    def write(label: str) -> None:
        ledger.effect(label)

    # When a message is performed
    with ledger.worker_and_relay():
        ledger.send(write.message("a"))
        ledger.expect_settled()

    # Then there is neither effect nor key nor dead letter
    assert ledger.effects() == ledger.done() == []
    assert ledger.letters() == []


# Due again


class ByHandError(Exception):
    """A body fails."""


def fails_by_exception(ledger: LedgerStage) -> None:
    raise ByHandError


def fails_by_time_limit(ledger: LedgerStage) -> None:
    while True:
        sleep(0.01)


def fails_by_swallowing(ledger: LedgerStage) -> None:
    with suppress(peewee.PeeweeException):
        ledger.database.execute_sql("SELECT 1/0")


def fails_by_silence(ledger: LedgerStage) -> None:
    sleep(0.6)  # idle_limit_ms is half of it
    ledger.effect("too late")


FAILURES: dict[str, Callable[[LedgerStage], None]] = {
    "ByHandError": fails_by_exception,
    "TimeLimitExceeded": fails_by_time_limit,
    "TransactionAborted": fails_by_swallowing,
    "LimitExceeded": fails_by_silence,
}


@pytest.mark.parametrize("error", FAILURES)
def test_a_failure_lets_the_row_be_due_again_and_counted_up(ledger: LedgerStage, error: str) -> None:
    # Given an actor that fails
    options = {"time_limit": 200} if error == "TimeLimitExceeded" else {"idle_limit_ms": 300}

    @ledger.actor(**options)
    def fails(label: str) -> None:
        ledger.effect(label)
        FAILURES[error](ledger)

    # When its message is performed
    with ledger.worker_and_relay(time_limits=True):
        message = ledger.send(fails.message("a"))
        eventually(lambda: [row.attempt for row in ledger.rows()] == [1], what=ledger.rows)
        eventually(lambda: ledger.in_redis() == [])

    # Then it is owed later, with one retry spent
    row = ledger.row()
    assert (row.message_id, row.published, row.message.options["retries"]) == (message.message_id, False, 1)
    assert row.due_in_s > 10
    assert error in row.message.options["traceback"]
    assert ledger.effects() == ledger.done() == []
    assert ledger.letters() == []


def test_a_failure_of_an_actor_without_a_key_lets_the_row_be_due_again(ledger: LedgerStage) -> None:
    # Given an actor without a key that fails
    @ledger.actor(idempotency="off")
    def fails(label: str) -> None:
        ledger.effect(label)
        raise ByHandError

    # When its message is performed
    with ledger.worker_and_relay():
        ledger.send(fails.message("a"))
        eventually(lambda: [row.attempt for row in ledger.rows()] == [1])
        eventually(lambda: ledger.in_redis() == [])

    # Then it is owed later; what it wrote stands, as it chose
    assert ledger.row().due_in_s > 10
    assert ledger.effects() == ["a"]


def test_what_a_hook_sends_after_a_failure_leaves_with_the_retry(ledger: LedgerStage) -> None:
    # Given an actor with on_failure, and a database that is gone when its body has failed
    @ledger.actor()
    def hears(message: dict[str, Any], error: dict[str, str]) -> None:
        ledger.effect(f"heard of {error['type']}")

    @ledger.actor()
    def fails(label: str) -> None:
        raise ByHandError

    class DatabaseGoes(Middleware):
        def after_process_message(self, broker: Any, message: Any, **outcome: Any) -> None:
            if message.actor_name == "fails":
                ledger.servers.postgres.stop()
                failed.set()

    failed = Event()
    ledger.broker.add_middleware(DatabaseGoes())
    with ledger.worker_and_relay():
        fails.send_with_options(args=("a",), on_failure=hears)
        assert failed.wait(20)

        # When nothing can be stored, nothing leaves
        assert [message.actor_name for message in ledger.messages("in_hand")] == ["fails"]
        assert ledger.messages("waiting") == []

        # Then both are stored when the database is back
        ledger.servers.postgres.start()
        ledger.hang_up()
        eventually(lambda: ledger.effects() == ["heard of ByHandError"], 20)
        eventually(lambda: [row.attempt for row in ledger.rows()] == [1])
    assert ledger.row().actor_name == "fails"


# Stays


def test_a_message_given_back_for_a_lock_keeps_its_row(ledger: LedgerStage) -> None:
    # Given somebody who holds a lock that a body waits for
    tries: list[str] = []
    ledger.sql("INSERT INTO effects VALUES ('locked')")

    @ledger.actor(max_retries=0)
    def write(label: str) -> None:
        tries.append(label)
        ledger.database.execute_sql("UPDATE effects SET label = %s", (label,))

    with ledger.rival() as rival, ledger.worker_and_relay(threads=1):
        rival.execute("SELECT * FROM effects FOR UPDATE")
        ledger.send(write.message("a"))
        eventually(lambda: tries)
        before = ledger.row()

        # When the body has waited for too long, twice
        eventually(lambda: len(tries) > 2)

        # Then its row is as it was
        assert ledger.row().is_still(before)
        assert (before.attempt, "retries" in before.message.options) == (0, False)

        # And ends with the delivery that gets the lock
        rival.connection.rollback()
        ledger.expect_settled()
    assert ledger.effects() == ["a"]


def test_a_message_given_back_for_a_lost_connection_keeps_its_row(ledger: LedgerStage) -> None:
    # Given a body that loses its connection the first time
    rows: list[Any] = []

    @ledger.actor(max_retries=0)
    def write(label: str) -> None:
        ledger.effect(label)
        rows.extend(ledger.rows())
        if len(rows) == 1:
            ledger.database.execute_sql("SELECT pg_terminate_backend(pg_backend_pid())")

    # When its message is performed
    with ledger.worker_and_relay():
        ledger.send(write.message("a"))
        eventually(ledger.effects)
        ledger.expect_settled()

    # Then both deliveries had the same row
    assert len(rows) == 2
    assert rows[1].is_still(rows[0])


def test_a_body_that_is_run_again_at_once_keeps_its_row_until_it_returns(ledger: LedgerStage) -> None:
    # Given a body that loses two deadlocks
    rows: list[Any] = []

    @ledger.actor(max_retries=0)
    def write(label: str) -> None:
        ledger.effect(label)
        rows.extend(ledger.rows())
        if len(rows) <= 2:
            ledger.database.execute_sql("DO $$ BEGIN RAISE 'no' USING ERRCODE = '40P01'; END $$")

    # When its message is performed
    with ledger.worker_and_relay():
        ledger.send(write.message("a"))
        eventually(ledger.effects)
        ledger.expect_settled()

    # Then all three runs had the same row
    assert [row.is_still(rows[0]) for row in rows] == [True] * 3


def test_a_message_of_a_worker_that_stops_keeps_its_row(ledger: LedgerStage) -> None:
    # Given one thread at work, and a message that waits for it in the worker's memory
    begun, go_on = Event(), Event()

    @ledger.actor(max_retries=0)
    def write(label: str) -> None:
        begun.set()
        assert go_on.wait(10)
        ledger.effect(label)

    with ledger.relay(), ledger.worker(threads=1) as worker:
        ledger.send(write.message("a"))
        assert begun.wait(10)
        waiting = ledger.send(write.message("b"))
        eventually(lambda: len(ledger.messages("in_hand")) == 2)
        (before,) = (row for row in ledger.rows() if row.message_id == waiting.message_id)

        # When the worker is told to stop
        stopping = Thread(target=worker.stop)
        stopping.start()
        eventually(lambda: ledger.places().get("waiting") == [waiting.message_id])
        go_on.set()
        stopping.join()

        # Then what it finished is done, and what it gave back is owed as it was
        assert ledger.row().is_still(before)
        assert ledger.effects() == ["a"]

    # And another worker does it
    with ledger.worker():
        ledger.expect_settled()
    assert ledger.effects() == ["a", "b"]
