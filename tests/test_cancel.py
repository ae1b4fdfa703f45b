"""Cancelling: a message whose key is taken first does not run, and counts as failed."""

from __future__ import annotations

from threading import Event, Thread
from typing import TYPE_CHECKING, Any

import pytest
from dramatiq import group, pipeline
from dramatiq.results import ResultFailure

from middleware.errors import ConfigurationError

from .processes import eventually

if TYPE_CHECKING:
    from dramatiq import Actor

    from .ledger_stage import LedgerStage

pytest_plugins = ("tests.stage", "tests.ledger_stage")


@pytest.fixture
def write(ledger: LedgerStage) -> Actor[..., Any]:
    """An actor whose effect is a label; its results are kept."""
    ledger.keep_results()

    @ledger.actor(store_results=True)
    def write(label: str, *_before: Any) -> str:
        ledger.effect(label)
        return label

    return write


@pytest.mark.parametrize("way", ["owed", "delayed", "in Redis alone", "not sent yet"])
def test_a_cancelled_message_does_not_run(ledger: LedgerStage, write: Actor[..., Any], way: str) -> None:
    # Given a message that has not begun
    message = write.message("a")
    if way == "owed":
        ledger.send(message)
    elif way == "delayed":
        ledger.send(message, delay=100)
    elif way == "in Redis alone":
        ledger.broker.enqueue(message)

    # When it is cancelled, then that is so
    assert ledger.broker.cancel(message) is True
    assert ledger.rows() == []

    # And it does not run, also when it comes
    with ledger.worker_and_relay():
        if way == "not sent yet":
            ledger.send(message)
        ledger.send(write.message("b"))
        ledger.expect_settled()
    assert ledger.effects() == ["b"]
    assert ledger.letters() == []


def test_what_was_published_already_does_not_run_either(ledger: LedgerStage, write: Actor[..., Any]) -> None:
    # Given a message that the relay has brought to Redis
    with ledger.relay():
        message = ledger.send(write.message("a"))
        eventually(lambda: ledger.in_redis() == [message.message_id])

        # When it is cancelled, and comes
        assert ledger.broker.cancel(message) is True
        with ledger.worker():
            ledger.expect_settled()

    # Then it has not run
    assert ledger.effects() == []
    assert ledger.letters() == []


def test_a_message_that_has_run_is_not_cancelled(ledger: LedgerStage, write: Actor[..., Any]) -> None:
    # Given a message that has run
    with ledger.worker_and_relay():
        message = ledger.send(write.message("a"))
        ledger.expect_settled()

    # When it is cancelled, then that fails, and nothing changes
    assert ledger.broker.cancel(message) is False
    assert ledger.stored() == (["a"], [("write", message.message_id)])


def test_a_message_that_is_running_is_not_cancelled_and_its_row_stays(ledger: LedgerStage) -> None:
    # Given a message that is running
    begun, go_on = Event(), Event()

    @ledger.actor()
    def hold() -> None:
        begun.set()
        assert go_on.wait(10)
        ledger.effect("held")

    with ledger.worker_and_relay():
        message = ledger.send(hold.message())
        assert begun.wait(10)

        # When it is cancelled, then that fails
        assert ledger.broker.cancel(message) is False
        assert ledger.owed() == [message.message_id]

        # And it goes on to its end
        go_on.set()
        ledger.expect_settled()
    assert ledger.effects() == ["held"]


def test_a_cancellation_that_is_rolled_back_is_none(ledger: LedgerStage, write: Actor[..., Any]) -> None:
    # Given a message, and a transaction that cancels it and is rolled back
    message = ledger.send(write.message("a"))
    with ledger.database.atomic() as transaction:
        assert ledger.broker.cancel(message) is True
        transaction.rollback()

    # Then it runs
    with ledger.worker_and_relay():
        ledger.expect_settled()
        assert message.get_result(backend=ledger.broker.get_results_backend()) == "a"
    assert ledger.effects() == ["a"]


def test_whoever_waits_for_a_cancelled_message_gets_an_error(
    ledger: LedgerStage, write: Actor[..., Any]
) -> None:
    # Given a message that was cancelled
    message = ledger.send(write.message("a"))
    ledger.broker.cancel(message)

    # When its result is waited for, then that raises at once
    with pytest.raises(ResultFailure, match="Cancelled"):
        message.get_result(backend=ledger.broker.get_results_backend(), block=True, timeout=20_000)


def test_the_chain_of_a_cancelled_step_ends_and_its_group_does_not_complete(
    ledger: LedgerStage, write: Actor[..., Any]
) -> None:
    # Given a group of a pipeline and a message, and a step that is still to be sent
    chain = pipeline([write.message("a"), write.message("b"), write.message("c")], broker=ledger.broker)
    whole = group([chain, write.message("d")], broker=ledger.broker)
    whole.add_completion_callback(write.message("done"))

    # When that step is cancelled, and the group is run
    assert ledger.broker.cancel(chain.messages[1]) is True
    with ledger.worker_and_relay():
        whole.run()
        eventually(lambda: len(ledger.effects()) == 2)
        ledger.expect_settled()

    # Then neither the step nor what follows it has run
    assert ledger.effects() == ["a", "d"]
    assert ledger.sql("SELECT waiting FROM barriers") == [(1,)]
    assert ledger.letters() == []


@pytest.mark.parametrize("early", [True, False], ids=["before it is sent", "while it is owed"])
def test_the_steps_before_a_cancelled_step_of_a_saga_are_undone_once(
    ledger: LedgerStage, write: Actor[..., Any], early: bool
) -> None:
    # Given a saga whose last step is due later
    @ledger.actor()
    def undo(message: dict[str, Any], _result: str) -> None:
        ledger.effect(f"undo {message['args'][0]}")

    last = write.message_with_options(args=("c",), delay=1_000 if early else 60_000)
    first = write.message_with_options(args=("a",), undone_by="undo")
    saga = pipeline([first, last], broker=ledger.broker)
    last = saga.messages[1]

    # When that is cancelled
    with ledger.worker_and_relay():
        if early:
            assert ledger.broker.cancel(last) is True
            saga.run()
        else:
            saga.run()
            eventually(lambda: ledger.owed() == [last.message_id])
            assert ledger.broker.cancel(last) is True
        eventually(lambda: len(ledger.effects()) == 2)
        ledger.expect_settled()

    # Then the first step is undone
    assert ledger.effects() == ["a", "undo a"]
    assert ledger.letters() == []


@pytest.mark.parametrize("idempotency", ["off", "external"])
def test_what_begins_before_its_key_is_taken_cannot_be_cancelled(
    ledger: LedgerStage, idempotency: str
) -> None:
    # Given an actor whose body may be running unseen
    @ledger.actor(idempotency=idempotency)
    def call() -> None: ...

    # When its message is cancelled, then that is refused
    with pytest.raises(ConfigurationError, match=r"cannot be cancelled.*Only actors whose idempotency"):
        ledger.broker.cancel(call.message())


def test_of_a_message_and_its_cancellation_exactly_one_takes_effect(
    ledger: LedgerStage, write: Actor[..., Any]
) -> None:
    # Given many messages that are being performed
    messages = [write.message(f"{number:03}") for number in range(120)]
    cancelled: list[str] = []

    def cancel(some: list[Any]) -> None:
        cancelled.extend(one.args[0] for one in some if ledger.broker.cancel(one))
        ledger.database.close()

    # When all are cancelled meanwhile, by two threads
    with ledger.worker_and_relay(threads=4):
        for message in messages:
            ledger.send(message)
        halves = [Thread(target=cancel, args=(half,)) for half in (messages[::-2], messages[::2])]
        for thread in halves:
            thread.start()
        for thread in halves:
            thread.join()
        ledger.expect_settled(30)

    # Then each was cancelled or has run, and none was both
    assert sorted([*cancelled, *ledger.effects()]) == [f"{number:03}" for number in range(120)]
    assert ledger.letters() == []
