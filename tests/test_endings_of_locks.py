"""How a delivery ends that met another transaction: held keys, held rows, deadlocks, serialisation."""

from __future__ import annotations

from threading import Barrier, Event
from typing import TYPE_CHECKING, Any

import peewee
import pytest

from .processes import eventually

if TYPE_CHECKING:
    from collections.abc import Callable

    from .stage import Stage

pytest_plugins = ("tests.stage",)

INSERT_KEY = "INSERT INTO processed_messages VALUES ('write', %s, 'rival', '', 1)"
#: Raises an error with this SQLSTATE as often as the sequence says, whatever is rolled back.
RAISE = """
    DO $$ BEGIN
        IF nextval('attempts') <= {times} THEN
            RAISE EXCEPTION 'said so' USING ERRCODE = '{sqlstate}';
        END IF;
    END $$
"""


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
        assert stage.effects() == stage.keys() == []
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
    assert stage.keys() == [("write", message.message_id)]


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
    assert stage.keys() == [("write", message.message_id)]


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
        assert stage.keys() == []

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
    assert stage.effects() == stage.keys() == []


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


@pytest.mark.parametrize("sqlstate", ["40001", "40P01"])
def test_a_lost_race_is_run_again_at_once_with_the_arguments_as_they_came_t17(
    stage: Stage, sqlstate: str
) -> None:
    # Given a body that loses three races, and changes its arguments
    stage.sql("CREATE SEQUENCE attempts")

    @stage.actor(max_retries=0)
    def write(labels: list[str]) -> None:
        stage.effect(labels.pop())
        stage.database.execute_sql(RAISE.format(times=3, sqlstate=sqlstate))

    # When it is performed
    with stage.worker():
        write.send(["a"])
        stage.expect_in_redis()

    # Then its fourth run took effect, in one delivery
    assert stage.effects() == ["a"]
    assert len(stage.keys()) == 1
    assert [seen.hook for seen in stage.witness.seen] == ["returned"]


@pytest.mark.parametrize("sqlstate", ["40001", "40P01"])
def test_a_race_that_is_lost_a_fourth_time_is_an_exception(stage: Stage, sqlstate: str) -> None:
    # Given a body that loses every race
    stage.sql("CREATE SEQUENCE attempts")

    @stage.actor()
    def write(labels: list[str]) -> None:
        stage.effect(labels.pop())
        stage.database.execute_sql(RAISE.format(times=100, sqlstate=sqlstate))

    # When it is performed
    with stage.worker():
        message = write.send(["a"])
        stage.expect_in_redis(delayed=[message])

    # Then it ran four times, a retry was spent, and the message is as it came
    assert stage.sql("SELECT last_value FROM attempts") == [(4,)]
    retry = stage.only("delayed")
    assert (retry.options["retries"], retry.args) == (1, (["a"],))
    assert stage.effects() == stage.keys() == []


def test_two_messages_that_deadlock_both_take_effect_without_a_retry(
    stage_with: Callable[..., Stage],
) -> None:
    # Given two messages that lock the same two things in opposite order
    stage = stage_with(session={"deadlock_timeout": "20ms"}, database={"lock_timeout_ms": 5_000})
    both = Barrier(2)
    met: set[str] = set()

    @stage.actor(max_retries=0)
    def write(first: int, second: int) -> None:
        stage.database.execute_sql("SELECT pg_advisory_xact_lock(%s)", (first,))
        if str(first) not in met:
            met.add(str(first))
            both.wait(10)
        stage.database.execute_sql("SELECT pg_advisory_xact_lock(%s)", (second,))
        stage.effect(str(first))

    # When both are performed
    with stage.worker():
        write.send(1, 2)
        write.send(2, 1)
        stage.expect_in_redis()

    # Then the victim was run again
    assert stage.effects() == ["1", "2"]
    assert [seen.hook for seen in stage.witness.seen] == ["returned", "returned"]


@pytest.mark.parametrize("isolation", ["repeatable read", "serializable"])
def test_a_duplicate_is_answered_under_stricter_isolation_i1_t11(
    stage_with: Callable[..., Stage], isolation: str
) -> None:
    # Given a database whose transactions are stricter by default
    stage = stage_with(session={"default_transaction_isolation": isolation.replace(" ", "\\ ")})
    levels: list[Any] = []

    @stage.actor(max_retries=0)
    def write(label: str) -> None:
        levels.append(stage.database.execute_sql("SHOW transaction_isolation").fetchone()[0])
        stage.effect(label)

    # When ten copies of one message are performed by four threads
    message = write.message("a")
    for _ in range(10):
        stage.broker.enqueue(message)
    with stage.worker(threads=4):
        stage.expect_in_redis()

    # Then one took effect, under that isolation, and none failed
    assert stage.effects() == ["a"]
    assert set(levels) == {isolation}
    assert stage.seen("raised") == []
