"""What a body may do inside the transaction of its key (I6)."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import peewee
import pytest
from psycopg2 import sql

from middleware.errors import TransactionAborted

from .processes import eventually

if TYPE_CHECKING:
    from collections.abc import Callable

    from .stage import Stage

pytest_plugins = ("tests.stage",)


def nested(stage: Stage) -> None:
    with stage.database.atomic(), stage.database.atomic():
        stage.effect("kept")


def nested_transaction(stage: Stage) -> None:
    with stage.database.transaction():
        stage.effect("kept")


def left_by_an_exception(stage: Stage) -> None:
    stage.effect("kept")
    try:
        with stage.database.atomic():
            stage.effect("lost")
            stage.database.execute_sql("SELECT 1/0")
    except peewee.DataError:
        pass


def rolled_back_by_hand(stage: Stage) -> None:
    stage.effect("kept")
    with stage.database.atomic() as savepoint:
        stage.effect("lost")
        savepoint.rollback()
    with stage.database.savepoint() as savepoint:
        stage.effect("lost")
        savepoint.rollback()


def savepoints_as_text(stage: Stage) -> None:
    stage.effect("kept")
    for text in ("SAVEPOINT here", "INSERT INTO effects VALUES ('lost')", "ROLLBACK TO SAVEPOINT here"):
        stage.database.execute_sql(text)
    stage.database.execute_sql("INSERT INTO effects VALUES ('lost'); ROLLBACK TO here; RELEASE here")
    stage.database.execute_sql("SAVEPOINT there; ROLLBACK WORK TO there")


def decorated(stage: Stage) -> None:
    @stage.database.atomic()  # type: ignore[untyped-decorator] # peewee has no types
    def write() -> None:
        stage.effect("kept")

    write()


def raw_cursors(stage: Stage) -> None:
    with stage.database.connection().cursor() as cursor:
        cursor.execute("INSERT INTO effects VALUES (%s)", ("kept",))
        cursor.executemany("INSERT INTO effects SELECT 'lost' WHERE %s", [(False,), (False,)])
    with stage.database.connection().cursor("on the server", withhold=True) as cursor:
        cursor.execute("SELECT 1")
        assert cursor.fetchall() == [(1,)]


def connected_already(stage: Stage) -> None:
    stage.database.connect(reuse_if_open=True)
    stage.effect("kept")


def another_actor(stage: Stage) -> None:
    stage.broker.get_actor("other")("kept")


#: What only looks like an end.
HARMLESS = [
    "SELECT CASE WHEN true\n THEN 1\n END",
    "SELECT CASE label WHEN 'x' THEN 1 ELSE 2\nEND FROM effects",
    "SELECT '; COMMIT; BEGIN'",
    "SELECT 'two lines\ncommit'",
    "SELECT $$; ROLLBACK;$$",
    "SELECT 1 -- ; COMMIT\n",
    "/* COMMIT */ SELECT 1 /*\nROLLBACK\n*/",
    "SELECT 1 AS commit_count",
    'SELECT 1 AS "COMMIT"',
    "DO $$\nBEGIN\n  PERFORM 1;\nEND\n$$",
    "CREATE FUNCTION one() RETURNS int LANGUAGE plpgsql AS $$\nBEGIN\n RETURN 1;\nEND $$",
    "CREATE FUNCTION two() RETURNS int LANGUAGE sql BEGIN ATOMIC SELECT 2; END",
    "SET LOCAL work_mem = '1MB'; SELECT 1",
    b"SELECT CASE WHEN true THEN 1\nEND",
    sql.SQL("SELECT {}").format(sql.Literal("; COMMIT")),
]


@pytest.mark.parametrize(
    "way",
    [
        nested,
        nested_transaction,
        left_by_an_exception,
        rolled_back_by_hand,
        savepoints_as_text,
        decorated,
        raw_cursors,
        connected_already,
        another_actor,
    ],
)
def test_what_stays_inside_the_transaction_is_allowed_i6(stage: Stage, way: Callable[[Stage], None]) -> None:
    # Given a body that does it, then writes once more
    @stage.actor()
    def other(label: str) -> None:
        stage.effect(label)

    @stage.actor()
    def write() -> None:
        way(stage)
        stage.effect("last")

    # When it is performed
    with stage.worker():
        message = write.send()
        eventually(lambda: stage.witness.seen)
        stage.expect_in_redis()

    # Then exactly that took effect, under the one key
    assert stage.effects() == ["kept", "last"]
    assert stage.key_rows() == [("write", message.message_id)]


def test_a_text_that_only_looks_like_an_end_is_allowed_i6(stage: Stage) -> None:
    # Given a body that sends several
    @stage.actor()
    def write() -> None:
        for text in HARMLESS:
            stage.database.execute_sql(text)
        stage.effect("kept")

    # When it is performed
    with stage.worker():
        write.send()
        eventually(lambda: stage.witness.seen)
        stage.expect_in_redis()

    # Then it took effect
    assert stage.effects() == ["kept"]
    assert len(stage.key_rows()) == 1


def test_an_actor_that_is_called_inside_another_goes_down_with_it_i6(stage: Stage) -> None:
    # Given an actor that calls another one, and then fails
    @stage.actor()
    def other(label: str) -> None:
        stage.effect(label)

    @stage.actor()
    def write() -> None:
        other("lost")
        raise ValueError("no")

    # When it is performed
    with stage.worker():
        message = write.send()
        stage.expect_in_redis(delayed=[message])

    # Then neither has taken effect
    assert stage.stored() == ([], [])


def test_a_body_that_swallowed_a_database_error_fails_with_the_first_error_t2(stage: Stage) -> None:
    # Given an actor that catches a database error and goes on
    @stage.actor()
    def write(label: str) -> None:
        stage.effect(label)
        for text in ("SELECT 1/0", "SELECT nonsense"):
            with contextlib.suppress(peewee.PeeweeException):
                stage.database.execute_sql(text)

    # When it is performed
    with stage.worker():
        message = write.send("a")
        stage.expect_in_redis(delayed=[message])

    # Then nothing is stored, a retry is spent, and the error names the first one
    assert stage.only("delayed").options["retries"] == 1
    assert stage.stored() == ([], [])
    (seen,) = stage.seen("raised")
    assert isinstance(seen.outcome, TransactionAborted)
    assert "division by zero" in str(seen.outcome)
