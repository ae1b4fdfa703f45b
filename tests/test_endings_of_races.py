"""How a delivery ends that lost a race: a deadlock, or a serialisation."""

from __future__ import annotations

from threading import Barrier
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    from .stage import Stage

pytest_plugins = ("tests.stage",)

#: Raises an error with this SQLSTATE as often as the sequence says, whatever is rolled back.
RAISE = """
    DO $$ BEGIN
        IF nextval('attempts') <= {times} THEN
            RAISE EXCEPTION 'said so' USING ERRCODE = '{sqlstate}';
        END IF;
    END $$
"""


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
    assert len(stage.key_rows()) == 1
    assert [seen.hook for seen in stage.witness.seen] == ["returned"]


def test_a_race_that_is_lost_at_commit_is_run_again_at_once(stage: Stage) -> None:
    # Given a constraint that is checked at COMMIT and loses three races there
    stage.sql("CREATE SEQUENCE attempts")
    stage.sql(
        "CREATE FUNCTION lose() RETURNS trigger LANGUAGE plpgsql AS "
        "'BEGIN IF nextval(''attempts'') <= 3 THEN RAISE serialization_failure; END IF; RETURN NULL; END'"
    )
    stage.sql(
        "CREATE CONSTRAINT TRIGGER lose AFTER INSERT ON effects DEFERRABLE INITIALLY DEFERRED "
        "FOR EACH ROW EXECUTE FUNCTION lose()"
    )

    @stage.actor(max_retries=0)
    def write(label: str) -> None:
        stage.effect(label)

    # When the message is performed
    with stage.worker():
        write.send("a")
        stage.expect_in_redis()

    # Then its fourth run took effect, in one delivery
    assert stage.effects() == ["a"]
    assert len(stage.key_rows()) == 1
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
    assert stage.stored() == ([], [])


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
