"""`migrate()`: numbered, repeatable, and safe when several start at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import closing
from typing import TYPE_CHECKING, Any
from urllib.parse import quote
from uuid import uuid4

import psycopg2
import pytest

from middleware import tables
from middleware.errors import ConfigurationError
from models import database, migrate
from models.migration import MIGRATION_LOCK, MIGRATIONS

from .processes import eventually
from .servers import PROJECT, Servers

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from psycopg2 import extensions

ALL = sorted(file.stem for file in MIGRATIONS.glob("0*.py"))

COLUMNS = """
    SELECT ordinal_position, column_name, data_type, is_nullable, column_default
    FROM information_schema.columns WHERE table_schema = %s AND table_name = %s ORDER BY 1
"""
CONSTRAINTS = """
    SELECT conname, pg_get_constraintdef(oid) FROM pg_constraint
    WHERE contype <> 'n' AND conrelid = (quote_ident(%s) || '.' || quote_ident(%s))::regclass
"""
INDEXES = "SELECT indexname FROM pg_indexes WHERE schemaname = %s AND tablename = %s"
TABLES = "SELECT tablename FROM pg_tables WHERE schemaname = %s AND tablename !~ 'migration'"


@pytest.fixture
def admin(servers: Servers) -> Iterator[extensions.connection]:
    """A connection beside the application's own, without its limits."""
    with closing(psycopg2.connect(servers.postgres.url)) as connection:
        connection.autocommit = True
        yield connection


@pytest.fixture
def schema(admin: extensions.connection) -> Iterator[str]:
    """An empty schema."""
    name = f"schema_{uuid4().hex}"
    ask(admin, f"CREATE SCHEMA {name}")
    yield name
    ask(admin, f"DROP SCHEMA {name} CASCADE")


def ask(connection: extensions.connection, statement: str, *values: object) -> list[tuple[Any, ...]]:
    """Execute a statement and return its rows."""
    with connection.cursor() as cursor:
        cursor.execute(statement, values)
        return cursor.fetchall() if cursor.description else []


def url_of(servers: Servers, schema: str, options: str = "") -> str:
    """The address of a schema, as an application would write it into DATABASE_URL."""
    separator = "&" if "?" in servers.postgres.url else "?"
    options = quote(f"-csearch_path={schema} {options}".strip())
    return f"{servers.postgres.url}{separator}options={options}"


class Migrating:
    """A process that migrates and prints what it applied."""

    def __init__(self, url: str, **variables: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", "import json, models; print(json.dumps(models.migrate()))"],
            cwd=PROJECT,
            env={**os.environ, "DATABASE_URL": url, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def applied(self) -> list[str]:
        """Wait for its end: what it applied."""
        output, errors = self.process.communicate(timeout=30)
        assert self.process.returncode == 0, errors
        applied: list[str] = json.loads(output)
        return applied


def test_an_empty_schema_of_the_search_path_gets_every_table(
    servers: Servers, admin: extensions.connection, schema: str
) -> None:
    # Given a DATABASE_URL whose search_path names an empty schema
    url = url_of(servers, schema)

    # When it is migrated
    applied = Migrating(url).applied()

    # Then every migration was applied, in order, and the tables are in that schema
    assert applied == ALL
    assert {name for (name,) in ask(admin, TABLES, schema)} == {
        "orders",
        "processed_messages",
        "stock",
    }


def test_a_second_migration_finds_nothing_to_do(servers: Servers, schema: str) -> None:
    # Given a schema that was migrated
    url = url_of(servers, schema)
    Migrating(url).applied()

    # When it is migrated again
    applied = Migrating(url).applied()

    # Then nothing was applied
    assert applied == []


@pytest.mark.parametrize("isolation", ["read\\ committed", "serializable"])
def test_of_several_migrations_that_start_at_once_one_does_the_work_t26(
    servers: Servers, admin: extensions.connection, schema: str, isolation: str
) -> None:
    # Given four processes that have all come as far as the lock, whatever the server's isolation
    url = url_of(servers, schema, f"-cdefault_transaction_isolation={isolation}")
    ask(admin, "SELECT pg_advisory_lock(%s)", MIGRATION_LOCK)
    processes = [Migrating(url) for _ in range(4)]
    wait_for_waiting_migrations(admin, 4)

    # When they go on at the same moment
    ask(admin, "SELECT pg_advisory_unlock(%s)", MIGRATION_LOCK)

    # Then all succeed, and each migration was applied by one of them
    assert sorted(name for process in processes for name in process.applied()) == ALL


def test_no_limit_of_the_workers_ends_a_migration(
    servers: Servers, admin: extensions.connection, schema: str
) -> None:
    # Given limits of a tenth of a second, and somebody who holds the lock of migrations
    url = url_of(servers, schema, "-cstatement_timeout=100")
    ask(admin, "SELECT pg_advisory_lock(%s)", MIGRATION_LOCK)
    process = Migrating(url, LOCK_TIMEOUT_MS="100", IDLE_LIMIT_MS="101")

    # When it has waited for three times as long
    wait_for_waiting_migrations(admin, 1, waited_ms=300)
    ask(admin, "SELECT pg_advisory_unlock(%s)", MIGRATION_LOCK)

    # Then it does its work all the same
    assert process.applied() == ALL


def wait_for_waiting_migrations(admin: extensions.connection, count: int, waited_ms: int = 0) -> None:
    """Wait until so many sessions have waited for the lock of migrations for so long."""
    waiting = """
        SELECT count(*) FROM pg_stat_activity
        WHERE wait_event = 'advisory' AND query LIKE '%%pg_advisory_xact_lock%%'
        AND clock_timestamp() - query_start > %s * interval '1 millisecond'
    """
    eventually(lambda: ask(admin, waiting, waited_ms) == [(count,)], 20)


def test_a_migration_that_fails_leaves_nothing_of_those_before_it(
    servers: Servers, admin: extensions.connection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given two new migrations, the second of which fails
    for name, statement in (
        ("9001_good", "CREATE TABLE made_by_9001 ()"),
        ("9002_bad", "SELECT 1 / 0"),
    ):
        (tmp_path / f"{name}.py").write_text(f"def up(migrator, db):\n    db.execute_sql({statement!r})\n")
    monkeypatch.setattr("models.migration.MIGRATIONS", tmp_path)

    # When they are applied
    with closing(database), pytest.raises(Exception, match="division by zero"):
        migrate()

    # Then the first is not there either, and may be applied again
    assert ask(admin, "SELECT to_regclass('made_by_9001')") == [(None,)]
    assert ask(admin, "SELECT name FROM schema_migration WHERE name LIKE '9%%'") == []


def test_a_search_path_without_a_schema_is_refused_with_a_sentence(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a search_path that names a schema that does not exist
    with closing(database):
        database.execute_sql("SET search_path = nowhere")

        # When it is migrated
        with pytest.raises(ConfigurationError) as refusal:
            migrate()

    # Then the sentence names the setting, its value and what to do
    assert "search_path nowhere of DATABASE_URL" in str(refusal.value)
    assert "CREATE SCHEMA" in str(refusal.value)


def test_the_migrated_inbox_is_what_peewee_makes_of_its_model(
    servers: Servers, admin: extensions.connection, schema: str
) -> None:
    # Given the table of the migration, and one that peewee creates in another schema
    of_peewee = schema

    class Twin(tables.ProcessedMessage):
        class Meta:
            database = database
            schema = of_peewee

    with closing(database):
        Twin.create_table()

    # When both are looked up in the catalogue
    migrated, made = (
        [ask(admin, query, name, "processed_messages") for query in (COLUMNS, CONSTRAINTS, INDEXES)]
        for name in ("public", of_peewee)
    )

    # Then columns, constraint and the lack of any other index agree
    assert migrated == made
    assert migrated[1] == [(tables.KEY_CONSTRAINT, "UNIQUE (consumer_name, message_id)")]
    assert migrated[2] == [(tables.KEY_CONSTRAINT,)]
