"""The application's database: its connections, how they end, and what is set on them (T5, T6, T18)."""

from __future__ import annotations

import os
import subprocess
import sys
from threading import Thread
from typing import TYPE_CHECKING, Any

import peewee
import pytest

from middleware import Database

from .processes import eventually
from .servers import PROJECT

if TYPE_CHECKING:
    from .stage import Stage

pytest_plugins = ("tests.stage",)


def scalar(database: Database, text: str) -> Any:
    return database.execute_sql(text).fetchone()[0]


def backend(database: Database) -> int:
    """The process that serves this thread's connection."""
    return int(scalar(database, "SELECT pg_backend_pid()"))


def is_gone(stage: Stage, pid: int) -> bool:
    return not stage.sql("SELECT 1 FROM pg_stat_activity WHERE pid = %s", pid)


def hang_up_on(stage: Stage, pid: int) -> None:
    """Let the server end a connection, as a restart does."""
    stage.sql("SELECT pg_terminate_backend(%s)", pid)
    eventually(lambda: is_gone(stage, pid))


@pytest.mark.parametrize("mode", ["fast", "immediate"])
def test_the_first_statement_after_a_restart_connects_again_without_an_error_t5(
    stage: Stage, mode: Any
) -> None:
    # Given connections that were used before the server was restarted
    others = [Database(stage.url()) for _ in range(3)]
    for database in (stage.database, *others):
        scalar(database, "SELECT 1")
    stage.hang_up()
    stage.servers.postgres.restart(mode)

    # When the next statement is a query, a write, a transaction, a look at the schema
    assert scalar(stage.database, "SELECT 2") == 2
    others[0].execute_sql("INSERT INTO effects VALUES ('a')")
    with others[1].atomic():
        others[1].execute_sql("INSERT INTO effects VALUES ('b')")
    tables = others[2].get_tables(schema="stage")

    # Then none of them has failed
    assert "effects" in tables
    assert stage.effects() == ["a", "b"]
    for database in others:
        database.close()


def test_a_connection_that_is_lost_in_a_transaction_fails_there_and_is_clean_afterwards_i8_t5(
    stage: Stage,
) -> None:
    # Given a transaction whose connection is lost
    def interrupted() -> None:
        with stage.database.atomic():
            stage.effect("lost")
            hang_up_on(stage, backend(stage.database))
            stage.effect("lost too")

    # When it goes on; then it fails, since nobody can repeat what was in it
    with pytest.raises(peewee.OperationalError):
        interrupted()
    # And the next statement is served
    stage.effect("a")
    assert stage.effects() == ["a"]


def test_close_really_closes(stage: Stage) -> None:
    # Given a connection
    pid = backend(stage.database)

    # When it is closed
    assert stage.database.close() is True

    # Then the server has lost it, a second close does nothing, and the next statement has another
    eventually(lambda: is_gone(stage, pid))
    assert stage.database.is_closed()
    assert stage.database.close() is False
    assert backend(stage.database) != pid


def test_each_thread_has_a_connection_of_its_own(stage: Stage) -> None:
    # Given a connection of this thread
    mine = backend(stage.database)
    pids: list[int] = []

    def use() -> None:
        pids.extend([backend(stage.database), backend(stage.database)])
        stage.database.close()

    # When two others use the database
    for _ in range(2):
        thread = Thread(target=use)
        thread.start()
        thread.join(10)

    # Then each had one, and kept it
    assert pids[0] == pids[1] != pids[2] == pids[3]
    assert mine not in pids
    assert backend(stage.database) == mine


FORK = """
import os, sys
from middleware import Database
database = Database(sys.argv[1])
def backend(): return database.execute_sql("SELECT pg_backend_pid()").fetchone()[0]
parent = backend()
sys.stdout.flush()
child = os.fork()
if child == 0:
    with database.atomic():
        print(backend(), flush=True)
    database.close()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
print(parent, backend())
"""


def test_a_connection_from_before_a_fork_is_not_shared_t18(stage: Stage) -> None:
    # Given a process that has a connection and forks
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORK, stage.url()],
        cwd=PROJECT, env=dict(os.environ), capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr

    # When both go on; then the child has one of its own, and the parent keeps the old one
    of_child, of_parent, of_parent_later = done.stdout.split()
    assert of_child != of_parent == of_parent_later


@pytest.mark.parametrize("scheme", ["postgresql", "postgres", "postgresql+psycopg2"])
def test_every_usual_scheme_of_an_address_is_understood(stage: Stage, scheme: str) -> None:
    database = Database(stage.url().replace("postgresql", scheme, 1))
    assert scalar(database, "SELECT current_schema()") == "stage"
    database.close()
