"""Pipelines and callbacks: what follows a message leaves with its transaction, once (T10, T24, T37)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from dramatiq import pipeline
from dramatiq.middleware import Callbacks, GroupCallbacks, Pipelines, Retries
from dramatiq.rate_limits.backends import StubBackend

from .processes import eventually

if TYPE_CHECKING:
    from collections.abc import Callable

    from dramatiq import Actor

    from .ledger_stage import LedgerStage

pytest_plugins = ("tests.stage", "tests.ledger_stage")


@pytest.fixture
def steps(ledger: LedgerStage) -> tuple[Actor[..., Any], Actor[..., Any], Actor[..., Any]]:
    """Three actors that write down what they were handed."""

    @ledger.actor()
    def pay(order: int) -> str:
        ledger.effect(f"1 pay {order}")
        return f"receipt {order}"

    @ledger.actor()
    def ship(place: str, receipt: str) -> str:
        ledger.effect(f"2 ship to {place} with {receipt}")
        return "parcel"

    @ledger.actor()
    def tell(parcel: str) -> None:
        ledger.effect(f"3 tell of {parcel}")

    return pay, ship, tell


DONE = ["1 pay 7", "2 ship to Rome with receipt 7", "3 tell of parcel"]


def test_each_step_gets_the_formers_result_although_all_come_three_times_t10(
    ledger: LedgerStage, steps: tuple[Actor[..., Any], ...]
) -> None:
    # Given a pipeline whose messages are in Redis three times each, as soon as they are known
    pay, ship, tell = steps
    chain = pipeline([pay.message(7), ship.message("Rome"), tell.message()], broker=ledger.broker)
    with ledger.worker_and_relay():
        chain.run()
        eventually(lambda: len(ledger.effects()) == 3)
        for message in (chain.messages[0], chain.messages[1].copy(args=("Rome", "receipt 7"))):
            ledger.broker.enqueue(message)
            ledger.broker.enqueue(message)

        # When all deliveries have ended
        eventually(lambda: len(ledger.seen("returned")) == 7)
        ledger.expect_settled()

    # Then each step ran once, with the result of the one before
    assert ledger.effects() == DONE
    assert len(ledger.done()) == 3


def test_the_next_step_is_a_row_of_the_transaction_of_the_one_before(
    ledger: LedgerStage, steps: tuple[Actor[..., Any], ...]
) -> None:
    # Given a pipeline
    pay, ship, _tell = steps
    writers = writers_of_rows(ledger)
    chain = pipeline([pay.message(7), ship.message("Rome")], broker=ledger.broker)

    # When it has run
    with ledger.worker_and_relay():
        chain.run()
        eventually(lambda: len(ledger.done()) == 2)
        ledger.expect_settled()

    # Then the second step was written by the transaction of the first, under the id that it had before
    first, second = (message.message_id for message in chain.messages)
    ((by,),) = ledger.sql("SELECT xmin::text FROM processed_messages WHERE message_id = %s", first)
    assert writers() == [(second, first, by)]


def test_a_retry_keeps_the_rest_of_its_chain_t24(
    ledger: LedgerStage, steps: tuple[Actor[..., Any], ...]
) -> None:
    # Given a first step that fails once
    _pay, ship, tell = steps
    runs: list[int] = []

    @ledger.actor(min_backoff=10, max_backoff=20)
    def stumble(order: int) -> str:
        runs.append(order)
        if len(runs) == 1:
            raise ValueError("not yet")
        return f"receipt {order}"

    # When its pipeline is run
    with ledger.worker_and_relay():
        pipeline([stumble.message(7), ship.message("Rome"), tell.message()], broker=ledger.broker).run()
        eventually(lambda: len(ledger.effects()) == 2)
        ledger.expect_settled()

    # Then it went on to its end
    assert ledger.effects() == DONE[1:]
    assert len(runs) == 2


def test_a_step_that_fails_for_good_ends_its_chain(
    ledger: LedgerStage, steps: tuple[Actor[..., Any], ...]
) -> None:
    # Given a step that fails for good
    pay, _ship, tell = steps

    @ledger.actor(throws=ValueError)
    def refuse(_receipt: str) -> None:
        raise ValueError("no")

    with ledger.worker_and_relay():
        # When its pipeline is run
        pipeline([pay.message(7), refuse.message(), tell.message()], broker=ledger.broker).run()
        eventually(ledger.letters)
        ledger.expect_settled()

    # Then what came before stands, and nothing follows
    assert ledger.effects() == ["1 pay 7"]


def test_a_duplicate_by_business_key_sets_off_its_own_chain_once_i5(
    ledger: LedgerStage, steps: tuple[Actor[..., Any], ...]
) -> None:
    # Given two pipelines whose first steps have the same business key
    pay, _ship, _tell = steps
    told: list[tuple[str, str]] = []

    @ledger.actor(idempotency="off")
    def tell_freely(name: str, receipt: str) -> None:
        told.append((name, receipt))

    first, second = (
        pipeline(
            [pay.message_with_options(args=(7,), idempotency_key="order-7"), tell_freely.message(name)],
            broker=ledger.broker,
        )
        for name in ("a", "b")
    )
    with ledger.worker_and_relay():
        with ledger.database.atomic():
            first.run()
        ledger.expect_settled()

        # When the second runs, and its first step comes again in the very form of its row
        with ledger.database.atomic():
            second.run()
        eventually(lambda: len(told) == 2)
        again = f"owed-0-3-pay{second.messages[0].message_id}"
        ledger.broker.do_enqueue("default", again, second.messages[0].encode())
        eventually(lambda: len(ledger.seen("returned")) == 5)
        ledger.expect_settled()

    # Then the work was done once, and each chain has gone on once
    assert ledger.effects() == ["1 pay 7"]
    assert told == [("a", "receipt 7"), ("b", "receipt 7")]


def test_a_step_without_a_transaction_hands_on_with_its_end(
    ledger: LedgerStage, steps: tuple[Actor[..., Any], ...]
) -> None:
    # Given an async step, which has no transaction and no key
    _pay, ship, tell = steps

    @ledger.actor(idempotency="off")
    def ask(order: int) -> str:
        return f"receipt {order}"

    # When it comes first in a pipeline
    with ledger.worker_and_relay():
        pipeline([ask.message(7), ship.message("Rome"), tell.message()], broker=ledger.broker).run()
        eventually(lambda: len(ledger.effects()) == 2)
        ledger.expect_settled()

    # Then the pipeline goes on
    assert ledger.effects() == DONE[1:]


def test_a_pipeline_runs_with_the_commit_or_not_at_all_i7(
    ledger: LedgerStage, steps: tuple[Actor[..., Any], ...]
) -> None:
    # Given a pipeline that is run in a transaction that is rolled back
    pay, _ship, _tell = steps
    with ledger.worker_and_relay():
        with ledger.database.atomic() as transaction:
            pipeline([pay.message(7), pay.message()], broker=ledger.broker).run()
            transaction.rollback()

        # When another one, sent later, has been performed
        ledger.send(pay.message(8))
        ledger.expect_settled()

    # Then nothing of it was
    assert ledger.effects() == ["1 pay 8"]


def test_a_result_that_cannot_be_handed_on_is_a_dead_letter_that_says_so_t13(
    ledger: LedgerStage, steps: tuple[Actor[..., Any], ...]
) -> None:
    _pay, _ship, tell = steps

    # Given a step whose result no encoder can hold
    @ledger.actor()
    def odd() -> object:
        ledger.effect("odd")
        return object()

    with ledger.worker_and_relay():
        # When it is the first of a pipeline
        pipeline([odd.message(), tell.message()], broker=ledger.broker).run()
        eventually(ledger.letters)
        ledger.expect_settled()

    # Then nothing was stored, and the dead letter names message and actor
    assert ledger.letter().error_class == "InvalidResult"
    ((text,),) = ledger.sql("SELECT error_text FROM dead_letters")
    assert "cannot be handed on to actor 'tell'" in text
    assert ledger.stored() == ([], [])


# Callbacks


def test_a_success_callback_leaves_once_with_the_transaction_t10_t24(ledger: LedgerStage) -> None:
    # Given an actor with a callback on itself, whose first attempt fails
    runs: list[int] = []

    @ledger.actor()
    def cheer(message: dict[str, Any], result: str) -> None:
        ledger.effect(f"{result} for {message['args']}")

    @ledger.actor(on_success="cheer", min_backoff=10, max_backoff=20)
    def pay(order: int) -> str:
        runs.append(order)
        if len(runs) == 1:
            raise ValueError("not yet")
        return "receipt"

    with ledger.worker_and_relay():
        # When its message is performed, and comes twice more
        message = ledger.send(pay.message(7))
        eventually(ledger.effects)
        for _ in range(2):
            ledger.broker.enqueue(message)
        eventually(lambda: len(ledger.seen("returned")) == 4)
        ledger.expect_settled()

    # Then the callback has run once
    assert ledger.effects() == ["receipt for [7]"]


def test_a_failure_callback_comes_once_for_each_failed_attempt_t37(ledger: LedgerStage) -> None:
    # Given a message with two retries, all of whose attempts fail
    @ledger.actor()
    def mourn(message: dict[str, Any], error: dict[str, str]) -> None:
        ledger.effect(f"{message['options']['retries']} {error['type']}: {error['message']}")

    @ledger.actor(on_failure="mourn", max_retries=2, min_backoff=10, max_backoff=20)
    def fail() -> None:
        raise ValueError("no")

    with ledger.worker_and_relay():
        # When it is performed, and its attempts come again
        message = ledger.send(fail.message())
        eventually(ledger.letters)
        ledger.expect_settled()
        for attempt in range(3):
            redis_id = f"owed-{attempt}-4-fail{message.message_id}"
            ledger.broker.do_enqueue("default", redis_id, message.encode())
        eventually(lambda: len(ledger.seen("raised")) == 6)
        ledger.expect_settled()

    # Then there is one callback for each, and one dead letter
    assert ledger.effects() == ["1 ValueError: no", "2 ValueError: no", "3 ValueError: no"]
    assert len(ledger.letters()) == 1


def test_a_failure_callback_leaves_with_the_row_of_the_retry_t37(ledger: LedgerStage) -> None:
    # Given a message whose attempt fails, and whose retry waits for long
    @ledger.actor()
    def mourn(_message: dict[str, Any], _error: dict[str, str]) -> None: ...

    @ledger.actor(on_failure="mourn")
    def fail() -> None:
        raise ValueError("no")

    writers = writers_of_rows(ledger)
    with ledger.worker_and_relay():
        # When it has been performed
        message = fail.send()
        eventually(lambda: len(ledger.done()) == 1)

    # Then the callback was written by the transaction that wrote the retry
    (retry,) = ledger.sql("SELECT message_id, NULL, xmin::text FROM outbox_messages")
    assert retry[0] == message.message_id
    (first, second) = writers()
    assert {first[1], second[1]} == {None, message.message_id}
    assert first[2] == second[2]


def writers_of_rows(ledger: LedgerStage) -> Callable[[], list[tuple[str, str | None, str]]]:
    """Write down who wrote each row of the ledger: message, parent, transaction."""
    ledger.sql("CREATE TABLE written (message_id text, parent_id text, writer text)")
    ledger.sql(
        "CREATE FUNCTION stage.note() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN INSERT INTO stage.written "
        "VALUES (NEW.message_id, NEW.parent_id, (pg_current_xact_id()::xid)::text); RETURN NEW; END $$"
    )
    ledger.sql(
        "CREATE TRIGGER note AFTER INSERT ON outbox_messages FOR EACH ROW EXECUTE FUNCTION stage.note()"
    )
    return lambda: [(a, b, c) for a, b, c in ledger.sql("SELECT message_id, parent_id, writer FROM written")]


# The stack


def add_before(ledger: LedgerStage) -> None:
    ledger.broker.add_middleware(GroupCallbacks(StubBackend()), before=Retries)


def add_after(ledger: LedgerStage) -> None:
    for one in (Callbacks(), Pipelines(), GroupCallbacks(StubBackend())):
        ledger.broker.add_middleware(one)


def put_in(ledger: LedgerStage) -> None:
    ledger.broker.add_middleware(Callbacks(), after=Retries)
    ledger.broker.add_middleware(Pipelines(), before=Callbacks)


@pytest.mark.parametrize("add", [add_before, add_after, put_in])
def test_stock_continuations_anywhere_in_the_stack_are_replaced_and_each_leaves_once(
    ledger: LedgerStage, add: Callable[[LedgerStage], None]
) -> None:
    # Given more of Dramatiq's own continuations in the stack
    add(ledger)
    assert not [
        one for one in ledger.broker.middleware if type(one) in (Callbacks, Pipelines, GroupCallbacks)
    ]
    sent: list[str] = []

    @ledger.actor(idempotency="off")
    def note(*_arguments: Any) -> None:
        sent.append("note")

    @ledger.actor(on_success="note")
    def pay() -> int:
        return 1

    # When a message has a callback and a next step
    with ledger.worker_and_relay():
        pipeline([pay.message(), note.message()], broker=ledger.broker).run()
        eventually(lambda: len(sent) == 2)
        ledger.expect_settled()

    # Then each has left once
    assert sent == ["note", "note"]


def test_a_stack_without_pipelines_goes_on_with_none(ledger_with: Callable[..., LedgerStage]) -> None:
    # Given a stack without Pipelines, in which Dramatiq would not go on either
    ledger = ledger_with(middleware=[Retries()])

    @ledger.actor()
    def write(label: str, *_result: Any) -> None:
        ledger.effect(label)

    # When a pipeline is run
    with ledger.worker_and_relay():
        pipeline([write.message("a"), write.message("b")], broker=ledger.broker).run()
        eventually(ledger.effects)
        ledger.expect_settled()

    # Then its first step is the last
    assert ledger.effects() == ["a"]
