"""How a delivery ends that met another transaction: held keys and held rows."""

from __future__ import annotations

from contextlib import suppress
from threading import Event
from typing import TYPE_CHECKING

import peewee
import pytest
from dramatiq.middleware import CurrentMessage

from .processes import eventually

if TYPE_CHECKING:
    from .stage import Stage

pytest_plugins = ("tests.stage",)

INSERT_KEY = "INSERT INTO processed_messages VALUES ('write', %s, 'rival', '', 1)"


def test_a_delivery_that_waits_too_long_for_its_key_is_given_back_t11_t22(stage: Stage) -> None:
    # Given a key that another transaction holds, and an actor without retries and with less time
    # than the wait takes
    @stage.actor(max_retries=0, time_limit=100)
    def write(label: str) -> None:
        stage.effect(label)

    message = write.send("a")
    sent = stage.raw("waiting")
    with stage.rival() as rival:
        rival.execute(INSERT_KEY, (message.message_id,))

        # When its delivery has come to nothing twice
        with stage.worker(time_limits=True):
            eventually(lambda: len(stage.seen("skipped")) >= 2)

        # Then the message is in its queue, byte for byte as it was, and nothing was decided
        assert stage.raw("waiting") == sent
        assert stage.places() == {"waiting": [message.message_id]}
        assert stage.stored() == ([], [])
        assert stage.seen("raised") == stage.seen("returned") == []

    # And when the other one has rolled back, it is performed
    with stage.worker(time_limits=True):
        stage.expect_in_redis()
    assert stage.effects() == ["a"]


def test_a_delivery_that_waits_for_a_key_that_is_committed_is_a_duplicate_i1_t11(stage: Stage) -> None:
    # Given a delivery whose body is at work
    begun, go_on = Event(), Event()

    @stage.actor()
    def write(label: str) -> None:
        stage.effect(label)
        begun.set()
        assert go_on.wait(10)

    with stage.worker():
        message = write.send("a")
        assert begun.wait(10)
        # When the same message is delivered meanwhile, and the body ends while it waits
        stage.broker.enqueue(message)
        eventually(lambda: stage.sql("SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock'"))
        go_on.set()
        stage.expect_in_redis()

    # Then there is one effect, and one body has run
    assert stage.effects() == ["a"]
    assert stage.key_rows() == [("write", message.message_id)]


def test_twenty_deliveries_at_once_have_one_effect_i1(stage: Stage) -> None:
    # Given twenty copies of one message
    @stage.actor()
    def write(label: str) -> None:
        stage.effect(label)

    message = write.message("a")
    for _ in range(20):
        stage.broker.enqueue(message)

    # When four threads perform them
    with stage.worker(threads=4):
        stage.expect_in_redis()

    # Then one of them took effect
    assert stage.effects() == ["a"]
    assert stage.key_rows() == [("write", message.message_id)]


def test_a_body_that_waits_too_long_for_a_lock_is_given_back_t11(stage: Stage) -> None:
    # Given a table that another transaction holds, and an actor without retries
    @stage.actor(max_retries=0)
    def write(labels: list[str]) -> None:
        stage.effect(labels.pop())

    message = write.send(["a"])
    sent = stage.raw("waiting")
    with stage.rival() as rival:
        rival.execute("LOCK TABLE effects")
        # When the body has waited for it
        with stage.worker():
            eventually(lambda: stage.seen("skipped"))
        # Then the message is in its queue as it was
        assert stage.raw("waiting") == sent
        assert stage.places() == {"waiting": [message.message_id]}
        assert stage.key_rows() == []

    # And when the table is free, it is performed
    with stage.worker():
        stage.expect_in_redis()
    assert stage.effects() == ["a"]


@pytest.mark.parametrize(
    "statement",
    [
        pytest.param("LOCK TABLE effects NOWAIT", id="nowait"),
        pytest.param("SET LOCAL lock_timeout = 20; LOCK TABLE effects", id="shorter limit"),
    ],
)
def test_a_lock_that_the_body_does_not_want_to_wait_for_is_an_exception(stage: Stage, statement: str) -> None:
    # Given a held table, and an actor that will not wait for it
    @stage.actor()
    def write(label: str) -> None:
        stage.database.execute_sql(statement)
        stage.effect(label)

    # When it is performed
    with stage.rival() as rival, stage.worker():
        rival.execute("LOCK TABLE effects")
        message = write.send("a")
        stage.expect_in_redis(delayed=[message])

    # Then a retry was spent
    assert stage.only("delayed").options["retries"] == 1
    assert stage.stored() == ([], [])


def test_a_lock_timeout_that_the_body_caught_around_a_savepoint_is_the_bodys_own_affair(
    stage: Stage,
) -> None:
    # Given an actor that has something else to do while a table is held
    stage.sql("CREATE TABLE held ()")

    @stage.actor()
    def write(label: str) -> None:
        try:
            with stage.database.atomic():
                stage.database.execute_sql("LOCK TABLE held")
        except peewee.OperationalError:
            stage.effect(label)

    # When it is performed
    with stage.rival() as rival, stage.worker():
        rival.execute("LOCK TABLE held")
        write.send("a")
        stage.expect_in_redis()

    # Then that took effect
    assert stage.effects() == ["a"]


def test_a_body_that_swallowed_a_lock_timeout_is_given_back_t2_t11(stage: Stage) -> None:
    # Given a body that does not want to know of the lock that it waited for
    @stage.actor(max_retries=0)
    def write(label: str) -> None:
        with suppress(peewee.OperationalError):
            stage.effect(label)

    # When it is performed while the table is held, and again when it is free
    with stage.rival() as rival, stage.worker():
        rival.execute("LOCK TABLE effects")
        write.send("a")
        eventually(lambda: stage.seen("skipped"))
        rival.connection.rollback()
        stage.expect_in_redis()

    # Then it took effect, and nothing was decided before
    assert stage.effects() == ["a"]
    assert stage.seen("raised") == []


def test_a_message_that_its_body_enqueues_again_is_given_back_all_the_same_t22(stage: Stage) -> None:
    # Given a body that enqueues its own message for later, and then waits for a held table
    stage.broker.add_middleware(CurrentMessage())

    @stage.actor()
    def write(label: str) -> None:
        message = CurrentMessage.get_current_message()
        assert message is not None
        stage.broker.enqueue(message, delay=3_600_000)
        stage.effect(label)

    with stage.rival() as rival:
        rival.execute("LOCK TABLE effects")
        # When it is performed in vain
        with stage.worker():
            message = write.send("a")
            eventually(lambda: stage.seen("skipped"))

        # Then it is in its queue, beside what it has enqueued
        places = stage.places()
        assert places["waiting"] == [message.message_id]
        assert set(places["delayed"]) == {message.message_id}


def test_what_is_given_back_goes_to_the_end_of_its_queue(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given one thread that takes one message at a time, and three messages, the first one held up
    monkeypatch.setattr("dramatiq.worker.QUEUE_PREFETCH", 1)

    @stage.actor()
    def write(label: str) -> None:
        stage.effect(label)

    messages = [write.send(label) for label in "abc"]
    with stage.rival() as rival:
        rival.execute(INSERT_KEY, (messages[0].message_id,))

        # When they are performed
        with stage.worker(threads=1):
            eventually(lambda: len(stage.seen("skipped")) == 2)

    # Then the others came before the held one's second attempt
    held, other, another = (message.message_id for message in messages)
    order = [seen.message_id for seen in stage.witness.seen]
    assert order[:4] == [held, other, another, held]
