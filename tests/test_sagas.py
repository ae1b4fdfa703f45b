"""Sagas: a step that fails for good sets off the undoing of the steps before it, latest first, once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from dramatiq import group, pipeline

from middleware import dead_letters
from middleware.errors import ConfigurationError, NotRequeued

from .processes import eventually

if TYPE_CHECKING:
    from collections.abc import Callable

    from dramatiq import Message

    from .ledger_stage import LedgerStage

pytest_plugins = ("tests.stage", "tests.ledger_stage")


class Journey:
    """Actors that book, each with one that undoes it, and a last step that fails; in order of time."""

    def __init__(self, ledger: LedgerStage, **failing: Any) -> None:
        self.ledger = ledger
        self.log: list[str] = []
        ledger.sql("CREATE TABLE log (at serial, line text)")

        @ledger.actor()
        def undo(message: dict[str, Any], result: str) -> None:
            self.note(f"undo {message['args'][0]}: {result}")

        @ledger.actor(undone_by="undo", pipe_ignore=True)
        def book(what: str) -> str:
            self.note(f"book {what}")
            return f"number of {what}"

        @ledger.actor(pipe_ignore=True)
        def look(what: str) -> None:
            self.note(f"look at {what}")

        options = {"throws": ValueError, **failing}

        @ledger.actor(**options)
        def fail() -> None:
            raise ValueError("no")

        self.book, self.look, self.fail, self.undo = book, look, fail, undo

    def note(self, line: str) -> None:
        self.ledger.database.execute_sql("INSERT INTO log (line) VALUES (%s)", (line,))

    def lines(self) -> list[str]:
        return [line for (line,) in self.ledger.sql("SELECT line FROM log ORDER BY at")]

    def run(self, *steps: Message[Any]) -> None:
        pipeline(steps, broker=self.ledger.broker).run()


UNDONE = [
    "book train",
    "look at map",
    "book room",
    "undo room: number of room",
    "undo train: number of train",
]


@pytest.mark.parametrize(
    "failing",
    [
        {},
        {"max_retries": 1, "throws": (), "min_backoff": 10, "max_backoff": 20},
        {"max_age": 1, "throws": ()},
    ],
    ids=["throws", "retries exhausted", "too old"],
)
def test_the_steps_before_one_that_fails_for_good_are_undone_the_latest_first(
    ledger: LedgerStage, failing: dict[str, Any]
) -> None:
    # Given a saga of four steps, two of which can be undone, and whose last fails for good
    journey = Journey(ledger, **failing)
    steps = journey.book.message("train"), journey.look.message("map"), journey.book.message("room")

    # When it is run
    with ledger.worker_and_relay():
        journey.run(*steps, journey.fail.message())
        eventually(lambda: len(journey.lines()) == 5)
        ledger.expect_settled()

    # Then those are undone, in reverse order
    assert journey.lines() == UNDONE
    assert len(ledger.letters()) == 1


def test_the_undoing_leaves_in_the_transaction_of_the_dead_letter(ledger: LedgerStage) -> None:
    # Given a saga, and a worker that cannot publish what is undone
    journey = Journey(ledger)
    ledger.sql("CREATE TABLE written (actor_name text, writer text)")
    ledger.sql(
        "CREATE FUNCTION stage.note() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN INSERT INTO stage.written "
        "VALUES (NEW.actor_name, pg_current_xact_id()::text); RETURN NEW; END $$"
    )
    for table in ("outbox_messages", "dead_letters"):
        ledger.sql(f"CREATE TRIGGER note AFTER INSERT ON {table} FOR EACH ROW EXECUTE FUNCTION stage.note()")

    # When it has failed
    with ledger.worker_and_relay():
        journey.run(journey.book.message("train"), journey.fail.message())
        eventually(lambda: len(journey.lines()) == 2)
        ledger.expect_settled()

    # Then one transaction wrote both
    writers = ledger.sql(
        "SELECT actor_name, writer FROM written WHERE writer = (SELECT max(writer) FROM written)"
    )
    assert [name for name, _ in writers] == ["fail", "undo"]


def test_the_undoing_comes_once_although_the_failing_step_comes_three_times_i5(ledger: LedgerStage) -> None:
    # Given a saga that has failed
    journey = Journey(ledger)
    failing = journey.fail.message()
    steps = journey.book.message("train"), failing
    with ledger.worker_and_relay():
        journey.run(*steps)
        eventually(lambda: len(journey.lines()) == 2)
        ((raw,),) = ledger.sql("SELECT message FROM dead_letters")

        # When its last step is delivered twice more
        for _ in range(2):
            ledger.broker.do_enqueue("default", f"owed-0-4-fail{failing.message_id}", bytes(raw))
            eventually(lambda: not ledger.in_redis())
        ledger.expect_settled()

    # Then nothing is undone again
    assert journey.lines() == ["book train", "undo train: number of train"]
    assert len(ledger.letters()) == 1


def test_a_step_that_another_message_did_is_not_undone(ledger: LedgerStage) -> None:
    # Given two sagas that book the same thing, under one business key
    journey = Journey(ledger)
    first, second = (
        journey.book.message_with_options(args=("train",), idempotency_key="the train") for _ in range(2)
    )

    # When the second one fails
    with ledger.worker_and_relay():
        journey.run(first, journey.look.message("map"))
        eventually(lambda: len(journey.lines()) == 2)
        journey.run(second, journey.book.message("room"), journey.fail.message())
        eventually(ledger.letters)
        ledger.expect_settled()

    # Then what the first one did stands
    assert journey.lines() == ["book train", "look at map", "book room", "undo room: number of room"]


def test_what_undoes_a_step_may_be_named_on_its_message(ledger: LedgerStage) -> None:
    # Given a step whose actor names nothing
    journey = Journey(ledger)
    step = journey.look.message_with_options(args=("map",), undone_by="undo")

    # When its saga fails
    with ledger.worker_and_relay():
        journey.run(step, journey.fail.message())
        eventually(lambda: len(journey.lines()) == 2)
        ledger.expect_settled()

    # Then it is undone
    assert journey.lines() == ["look at map", "undo map: None"]


def test_an_undoing_that_fails_stops_there_and_goes_on_when_it_is_requeued(ledger: LedgerStage) -> None:
    # Given a saga whose latest step cannot be undone at first
    journey = Journey(ledger)
    fails = [True]

    @ledger.actor(throws=ValueError)
    def leave(_message: dict[str, Any], _result: str) -> None:
        if fails:
            raise ValueError("the door is shut")
        journey.note("leave")

    room = journey.book.message_with_options(args=("room",), undone_by="leave")
    with ledger.worker_and_relay():
        journey.run(journey.book.message("train"), room, journey.fail.message())
        eventually(lambda: len(ledger.letters()) == 2)
        ledger.expect_settled()
        assert journey.lines() == ["book train", "book room"]

        # When that is mended, and its dead letter is requeued
        fails.clear()
        assert ledger.broker.ledger is not None
        (letter,) = (one for one in dead_letters.newest(ledger.broker.ledger, 9) if one.actor_name == "leave")
        dead_letters.requeue(ledger.broker.ledger, letter)
        ledger.expect_settled()

    # Then the steps before it are undone too
    assert journey.lines() == ["book train", "book room", "leave", "undo train: number of train"]


def test_requeueing_a_step_whose_saga_was_undone_is_refused_unless_forced(ledger: LedgerStage) -> None:
    # Given the dead letter of a saga
    fails = [True]
    journey = Journey(ledger)

    @ledger.actor(throws=ValueError)
    def arrive() -> None:
        if fails:
            raise ValueError("no")
        journey.note("arrive")

    with ledger.worker_and_relay():
        journey.run(journey.book.message("train"), arrive.message_with_options(pipe_ignore=True))
        eventually(lambda: len(journey.lines()) == 2)
        ledger.expect_settled()
        fails.clear()
        assert ledger.broker.ledger is not None
        (letter,) = dead_letters.newest(ledger.broker.ledger, 9)

        # When it is requeued, then that is refused with the reason
        with pytest.raises(NotRequeued, match=r"a step of a saga: the steps before it are undone.*'undo'"):
            dead_letters.requeue(ledger.broker.ledger, letter)

        # But not when it is forced
        dead_letters.requeue(ledger.broker.ledger, letter, force=True)
        ledger.expect_settled()
    assert journey.lines() == ["book train", "undo train: number of train", "arrive"]


def test_a_long_saga_does_not_carry_more_with_each_step_than_what_undoes_it(ledger: LedgerStage) -> None:
    # Given a saga of 30 steps
    journey = Journey(ledger)
    steps = [journey.book.message(f"{number}") for number in range(30)]

    # When it fails at its end
    with ledger.worker_and_relay():
        journey.run(*steps, journey.fail.message())
        eventually(lambda: len(journey.lines()) == 60, 40)
        ledger.expect_settled()

    # Then all are undone, and the last message was no larger than all of them together
    assert journey.lines()[30:] == [f"undo {number}: number of {number}" for number in reversed(range(30))]
    assert len(ledger.letter().message) < 30 * 1_000


def test_a_saga_that_is_a_member_of_a_group_undoes_its_own_steps(ledger: LedgerStage) -> None:
    # Given a group of a saga that fails and a message
    journey = Journey(ledger)
    saga = pipeline([journey.book.message("train"), journey.fail.message()], broker=ledger.broker)
    whole = group([saga, journey.look.message("map")], broker=ledger.broker)
    whole.add_completion_callback(journey.look.message("nothing"))

    # When it is run
    with ledger.worker_and_relay():
        whole.run()
        eventually(lambda: len(journey.lines()) == 3)
        ledger.expect_settled()

    # Then the saga is undone, the other member stands, and the group is not complete
    assert sorted(journey.lines()) == ["book train", "look at map", "undo train: number of train"]


@pytest.mark.parametrize("name", [5, ["undo"]])
def test_undone_by_must_be_the_name_of_an_actor(ledger: LedgerStage, name: Any) -> None:
    declare: Callable[..., Any] = ledger.actor(undone_by=name)
    with pytest.raises(ConfigurationError, match=r"undone_by is .*; it must be the name of an actor"):

        @declare
        def book() -> None: ...
