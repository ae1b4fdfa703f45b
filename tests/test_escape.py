"""A body cannot end the transaction of its key, or the delivery fails loudly (I6, T2, T3)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import psycopg2.extensions
import pytest
from psycopg2 import sql
from psycopg2.extensions import AsIs

from .processes import eventually

if TYPE_CHECKING:
    from collections.abc import Callable

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


def is_a_dead_letter(stage: Stage, way: Callable[[Database], Any], *, swallows: bool) -> None:
    """Perform a message whose body tries to escape, and another one on the same thread."""

    @stage.actor()
    def write(label: str) -> None:
        stage.effect(label)
        if label == "escapes":
            try:
                way(stage.database)
            except Exception:
                if not swallows:
                    raise

    with stage.worker(threads=1):
        message = write.send("escapes")
        stage.expect_in_redis(dead=[message])
        write.send("stays")
        eventually(lambda: "stays" in stage.effects())
        stage.expect_in_redis(dead=[message])
    # No retry was spent: running it again might do it again.
    assert stage.only("dead").options.get("retries", 0) == 0


@pytest.mark.parametrize("swallows", [False, True], ids=["raises", "swallows"])
@pytest.mark.parametrize("way", REFUSED)
def test_ending_the_transaction_is_refused_and_a_dead_letter_at_once_i6_t3(
    stage: Stage, caplog: pytest.LogCaptureFixture, way: str, swallows: bool
) -> None:
    # Given a body that ends its transaction, and may not look at the error
    # When it is performed
    is_a_dead_letter(stage, REFUSED[way], swallows=swallows)

    # Then neither key nor effect is there; the log says what to remove; the thread goes on (I8)
    assert stage.effects() == ["stays"]
    assert len(stage.key_rows()) == 1
    assert "ended, or tried to end, the transaction" in caplog.text


@pytest.mark.parametrize("text", TEXTS, ids=ascii)
def test_a_text_that_ends_the_transaction_is_refused_i6_t3(stage: Stage, text: Any) -> None:
    # Given a body that sends it, and does not look at the error
    # When it is performed
    is_a_dead_letter(stage, lambda database: database.execute_sql(text), swallows=True)

    # Then neither key nor effect is there
    assert stage.effects() == ["stays"]
    assert len(stage.key_rows()) == 1


@pytest.mark.parametrize("text", NOTICED, ids=ascii)
def test_a_longer_text_that_ends_the_transaction_is_noticed_i6_t3(stage: Stage, text: Any) -> None:
    # Given a body that sends it
    # When it is performed
    is_a_dead_letter(stage, lambda database: database.execute_sql(text), swallows=False)

    # Then effect and key are both there, or neither is
    escaped = [key for key in stage.key_rows() if key[1] == stage.only("dead").message_id]
    assert len(escaped) == stage.effects().count("escapes")


@pytest.mark.parametrize(
    "way",
    [
        pytest.param(another_connection, id="another connection"),
        pytest.param(one_phase_of_two, id="two-phase commit"),
        pytest.param(
            lambda database: database.cursor().executemany("COMMIT AND CHAIN", [()]), id="executemany"
        ),
        pytest.param(
            lambda database: database.execute_sql("%s", (AsIs("COMMIT"),)), id="a parameter that is SQL"
        ),
    ],
)
def test_what_nobody_can_refuse_is_noticed_before_the_acknowledgement_i6(
    stage: Stage, way: Callable[[Database], Any]
) -> None:
    # Given a body that gets round every guard
    # When it is performed
    is_a_dead_letter(stage, way, swallows=False)

    # Then the message is no success, and its effect does not stand without its key
    escaped = [key for key in stage.key_rows() if key[1] == stage.only("dead").message_id]
    assert len(escaped) == stage.effects().count("escapes")
