"""What a body does through psycopg2 itself: cursors of any class, settings of the session."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from psycopg2 import extensions
from psycopg2.extras import DictCursor, RealDictCursor

from .processes import eventually

if TYPE_CHECKING:
    from .stage import Stage

pytest_plugins = ("tests.stage",)


@pytest.mark.parametrize("factory", [RealDictCursor, DictCursor, extensions.cursor])
def test_a_cursor_of_any_class_cannot_end_the_transaction_i6_t3(stage: Stage, factory: Any) -> None:
    # Given a body that writes, and commits through a cursor of its own
    @stage.actor(max_retries=5)
    def write(label: str) -> None:
        cursor = stage.database.connection().cursor(cursor_factory=factory)
        cursor.execute("INSERT INTO effects VALUES (%s)", (label,))
        cursor.execute("commit")

    # When it runs
    message = write.send("a")
    with stage.worker():
        # Then nothing is committed, and the message is a dead letter at once
        stage.expect_in_redis(dead=[message])
    assert stage.stored() == ([], [])


@pytest.mark.parametrize("factory", [RealDictCursor, extensions.cursor])
def test_a_lock_that_a_cursor_of_any_class_waits_for_spends_no_retry_i9(stage: Stage, factory: Any) -> None:
    # Given a row that somebody else has locked, and an actor without retries
    stage.sql("INSERT INTO effects VALUES ('locked')")

    @stage.actor(max_retries=0)
    def change() -> None:
        cursor = stage.database.connection().cursor(cursor_factory=factory)
        cursor.execute("UPDATE effects SET label = 'changed'")

    with stage.rival() as rival, stage.worker():
        rival.execute("SELECT FROM effects FOR UPDATE")
        message = change.send()
        # When it has waited for longer than lock_timeout
        eventually(lambda: stage.seen("skipped"))
        assert [one.message_id for one in stage.messages("dead")] == []
        rival.execute("ROLLBACK")
        # Then it comes again and takes effect
        eventually(lambda: stage.effects() == ["changed"])
        stage.expect_in_redis()
    assert stage.key_rows() == [("change", message.message_id)]


def test_what_a_body_sets_for_its_session_ends_with_its_delivery_i1_i8(stage: Stage) -> None:
    # Given a schema with a table of keys of its own, and a body that goes there
    stage.sql("CREATE SCHEMA IF NOT EXISTS elsewhere")
    stage.sql(
        "CREATE TABLE IF NOT EXISTS elsewhere.processed_messages (LIKE processed_messages INCLUDING ALL)"
    )

    @stage.actor()
    def write(label: str) -> None:
        stage.effect(label)

    @stage.actor()
    def wander() -> None:
        stage.database.execute_sql("SET search_path = elsewhere, public")

    # When a message is delivered again on the thread that ran it
    message = write.message("a")
    with stage.worker(threads=1):
        for each in (message, wander.message(), message):
            stage.broker.enqueue(each)
        eventually(lambda: len(stage.seen("returned")) == 3)
    stage.sql("DROP SCHEMA elsewhere CASCADE")

    # Then it finds its key
    assert stage.effects() == ["a"]
