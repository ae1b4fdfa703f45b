"""A body cannot end the transaction of its key, or the delivery fails loudly (I6, T2, T3)."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import psycopg2.extensions
from psycopg2 import sql
from psycopg2.extensions import AsIs

from .processes import eventually

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

    from middleware import Database

    from .stage import Stage

pytest_plugins = ("tests.stage",)


def connection_context(database: Database) -> None:
    with database.connection_context():
        pass


def database_context(database: Database) -> None:
    with database:
        pass


def psycopg2_context(database: Database) -> None:
    with database.connection():
        pass


def another_connection(database: Database) -> None:
    database.dispose()
    database.execute_sql("INSERT INTO effects VALUES ('elsewhere')")


def one_phase_of_two(database: Database) -> None:
    connection = database.connection()
    connection.autocommit = False
    connection.tpc_begin("onetake")
    connection.tpc_commit()


#: What no guard can refuse.
ELUSIVE: dict[str, Callable[[Database], Any]] = {
    "another connection": another_connection,
    "two-phase commit": one_phase_of_two,
    "executemany": lambda database: database.cursor().executemany("COMMIT AND CHAIN", [()]),
    "a parameter that is SQL": lambda database: database.execute_sql("%s", (AsIs("COMMIT"),)),
}
#: What is refused before it happens: neither key nor effect is stored.
REFUSED: dict[str, Callable[[Database], Any]] = {
    "commit": lambda database: database.commit(),
    "rollback": lambda database: database.rollback(),
    "top_transaction().commit()": lambda database: database.top_transaction().commit(),
    "top_transaction().rollback()": lambda database: database.top_transaction().rollback(),
    "session_commit": lambda database: database.session_commit(),
    "session_rollback": lambda database: database.session_rollback(),
    "close": lambda database: database.close(),
    "connection_context": connection_context,
    "with database": database_context,
    "connection().commit()": lambda database: database.connection().commit(),
    "connection().rollback()": lambda database: database.connection().rollback(),
    "connection().close()": lambda database: database.connection().close(),
    "with connection()": psycopg2_context,
    "psycopg2's own close": lambda database: psycopg2.extensions.connection.close(database.connection()),
}
#: The same as texts.
TEXTS: list[Any] = [
    "COMMIT",
    "commit work;",
    "  END",
    "end transaction",
    "ROLLBACK",
    "Rollback Work",
    "ABORT",
    "COMMIT AND CHAIN",
    "ROLLBACK AND CHAIN",
    "PREPARE TRANSACTION 'onetake'",
    "-- well\nCOMMIT",
    "/* well */ /* then */ COMMIT",
    "/* a /* nested */ one */ COMMIT",
    b"COMMIT",
    sql.SQL("COMMIT"),
    sql.SQL("{}").format(sql.SQL("ROLLBACK")),
]
#: What is noticed afterwards: the effect may stand, but never without its key.
NOTICED: list[Any] = [
    ";COMMIT",
    "SELECT 1; COMMIT",
    "SELECT 1; ROLLBACK",
    "SELECT 1; COMMIT; BEGIN",
    "SELECT 1; ROLLBACK; BEGIN; SELECT 2",
    "SELECT 1; COMMIT AND CHAIN",
    "SELECT 1; -- well\n COMMIT; BEGIN",
    "SELECT 1 /* ; */; /* well */ END; BEGIN",
    "-- well\rCOMMIT AND CHAIN",
    "SELECT ';'; COMMIT AND CHAIN",
    b"SELECT 1; COMMIT AND CHAIN",
    sql.SQL("SELECT 1; COMMIT AND CHAIN"),
]


def by_text(texts: list[Any]) -> dict[str, Callable[[Database], Any]]:
    """A way for each text, named after it."""
    return {ascii(text): partial(send, text) for text in texts}


def send(text: Any, database: Database) -> None:
    database.execute_sql(text)


def perform(stage: Stage, ways: dict[str, Callable[[Database], Any]]) -> list[str]:
    """Perform two messages for each way, whose bodies look at the error of it, or do not.

    Returns:
      The labels of the messages that are not a dead letter without a retry; none of them, if all
      is well, and between them messages that stay inside have taken effect.
    """

    @stage.actor()
    def write(label: str, way: str, *, swallows: bool) -> None:
        stage.effect(label)
        try:
            ways[way](stage.database)
        except Exception:
            if not swallows:
                raise

    @stage.actor()
    def stay(label: str) -> None:
        stage.effect(label)

    labels = set()
    for way in ways:
        for swallows in (False, True):
            labels.add(label := f"{way}, {'swallowed' if swallows else 'raised'}")
            write.send(label, way, swallows=swallows)
        stay.send("stays")
    with stage.worker(threads=1):
        eventually(lambda: len(stage.seen("raised")) + len(stage.seen("returned")) == 3 * len(ways), 30)
        eventually(lambda: "in_hand" not in stage.places())
    # Running one again might do it again.
    dead = {message.args[0] for message in stage.messages("dead") if "retries" not in message.options}
    assert stage.effects().count("stays") == len(ways)
    return sorted(labels - dead)


def keys_of_dead_letters(stage: Stage) -> list[str]:
    """The labels of the dead letters whose key is stored."""
    keys = {key for _, key in stage.key_rows()}
    return sorted(message.args[0] for message in stage.messages("dead") if message.message_id in keys)


def effects_of_dead_letters(stage: Stage) -> list[str]:
    """Their effects."""
    return [label for label in stage.effects() if label not in ("stays", "elsewhere")]


def test_ending_the_transaction_is_refused_and_a_dead_letter_at_once_i6_i8_t3(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    # Given bodies that end their transaction
    # When they are performed by one thread, others between them
    assert perform(stage, REFUSED) == []

    # Then neither keys nor effects are there, and the log says what to remove
    assert effects_of_dead_letters(stage) == []
    assert len(stage.key_rows()) == len(REFUSED)
    assert caplog.text.count("ended, or tried to end, the transaction") >= 2 * len(REFUSED)


def test_a_text_that_ends_the_transaction_is_refused_i6_i8_t3(stage: Stage) -> None:
    # Given bodies that send one
    # When they are performed
    assert perform(stage, by_text(TEXTS)) == []

    # Then neither keys nor effects are there
    assert effects_of_dead_letters(stage) == []
    assert len(stage.key_rows()) == len(TEXTS)


def test_a_longer_text_that_ends_the_transaction_is_noticed_i6_i8_t3(stage: Stage) -> None:
    # Given bodies that send one
    # When they are performed
    assert perform(stage, by_text(NOTICED)) == []

    # Then no effect stands without its key
    assert effects_of_dead_letters(stage) == keys_of_dead_letters(stage)


def test_what_nobody_can_refuse_is_noticed_before_the_acknowledgement_i6_i8(stage: Stage) -> None:
    # Given bodies that get round every guard
    # When they are performed
    assert perform(stage, ELUSIVE) == []

    # Then no effect stands without its key
    assert effects_of_dead_letters(stage) == keys_of_dead_letters(stage)
