"""`migrate()`: numbered, repeatable, and safe when several start at once."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from contextlib import closing
from typing import TYPE_CHECKING, Any
from urllib.parse import quote
from uuid import uuid4

import psycopg2
import pytest

from middleware import DurableRedisBroker, IdempotentConsumer, tables
from middleware.errors import ConfigurationError
from middleware.schema import migrate as make_tables
from models import database, migrate
from models.migration import MIGRATION_LOCK, MIGRATIONS

from .processes import eventually
from .servers import PROJECT, Servers

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from psycopg2 import extensions

ALL = sorted(file.stem for file in MIGRATIONS.glob("0*.py"))

# A number of its own comes from an identity here and from a sequence in peewee.
COLUMNS = """
    SELECT ordinal_position, column_name, data_type, is_nullable,
           CASE WHEN is_identity = 'YES' OR column_default LIKE 'nextval%%' THEN 'the next number'
                ELSE column_default END
    FROM information_schema.columns WHERE table_schema = %s AND table_name = %s ORDER BY 1
"""
CONSTRAINTS = """
    SELECT conname, pg_get_constraintdef(oid) FROM pg_constraint
    WHERE contype <> 'n' AND conrelid = (quote_ident(%s) || '.' || quote_ident(%s))::regclass
"""
INDEXES = """
    SELECT indexname, substr(indexdef, strpos(indexdef, ' USING ')) FROM pg_indexes
    WHERE schemaname = %s AND tablename = %s ORDER BY 1
"""
OPTIONS = """
    SELECT reloptions FROM pg_class
    WHERE oid = (quote_ident(%s) || '.' || quote_ident(%s))::regclass
"""
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


#: Migrates as far as a folder of migrations goes.
MIGRATE = """
import json, pathlib, sys, models.migration
models.migration.MIGRATIONS = pathlib.Path(sys.argv[1])
print(json.dumps(models.migrate()))
"""


class Migrating:
    """A process that migrates and prints what it applied."""

    def __init__(self, url: str, folder: Path = MIGRATIONS, **variables: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", MIGRATE, str(folder)],
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
        "barrier_members",
        "barriers",
        "daily_reports",
        "dead_letters",
        "notifications",
        "orders",
        "outbox_messages",
        "processed_messages",
        "shipments",
        "stock",
        "ticks",
    }


def test_a_second_migration_finds_nothing_to_do(servers: Servers, schema: str) -> None:
    # Given a schema that was migrated
    url = url_of(servers, schema)
    Migrating(url).applied()

    # When it is migrated again
    applied = Migrating(url).applied()

    # Then nothing was applied
    assert applied == []


def test_the_ledger_is_added_to_the_tables_of_the_processor_with_rows_in_them(
    servers: Servers, admin: extensions.connection, schema: str, tmp_path: Path
) -> None:
    # Given the tables from before there was a ledger, with an order in each state and a key
    url = url_of(servers, schema)
    before = [name for name in ALL if name < "0003"]
    for name in before:
        shutil.copy(MIGRATIONS / f"{name}.py", tmp_path)
    assert Migrating(url, tmp_path).applied() == before
    ask(admin, f"INSERT INTO {schema}.stock VALUES ('SKU-1', 5)")
    ask(
        admin,
        f"INSERT INTO {schema}.orders (sku, quantity, customer, state, reserved_at) VALUES"
        " ('SKU-1', 1, 'Ada', 'placed', NULL), ('SKU-1', 1, 'Ada', 'rejected', NULL),"
        " ('SKU-1', 1, 'Ada', 'reserved', now())",
    )
    ask(
        admin,
        f"INSERT INTO {schema}.processed_messages"
        " (consumer_name, message_id, performed_by, payload_digest, digest_version)"
        " VALUES ('reserve_stock', 'a', 'a', '', 1)",
    )
    rows = f"SELECT id, sku, quantity, customer, state, reserved_at FROM {schema}.orders ORDER BY id"
    orders = ask(admin, rows)

    # When they are migrated
    applied = Migrating(url).applied()

    # Then every row is as it was, and an order can be shipped
    assert applied == [name for name in ALL if name not in before]
    assert ask(admin, rows) == orders
    assert ask(admin, f"SELECT message_id FROM {schema}.processed_messages") == [("a",)]
    ask(admin, f"UPDATE {schema}.orders SET state = 'shipped' WHERE state = 'reserved'")
    assert ask(admin, f"SELECT count(*) FROM {schema}.outbox_messages") == [(0,)]


def test_an_order_that_was_confirmed_counts_as_shipped(
    servers: Servers, admin: extensions.connection, schema: str, tmp_path: Path
) -> None:
    # Given the tables from before orders were paid, with a confirmed order and a placed one
    url = url_of(servers, schema)
    for name in (name for name in ALL if name < "0005"):
        shutil.copy(MIGRATIONS / f"{name}.py", tmp_path)
    Migrating(url, tmp_path).applied()
    ask(admin, f"INSERT INTO {schema}.stock VALUES ('SKU-1', 5)")
    ask(
        admin,
        f"INSERT INTO {schema}.orders (sku, quantity, customer, state, confirmed_at) VALUES"
        " ('SKU-1', 1, 'Ada', 'confirmed', '2026-01-01Z'), ('SKU-1', 1, 'Ada', 'placed', NULL)",
    )

    # When they are migrated
    Migrating(url).applied()

    # Then the confirmed one is shipped, since it was confirmed, and the other one is as it was
    assert ask(admin, f"SELECT state FROM {schema}.orders ORDER BY id") == [("shipped",), ("placed",)]
    shipped = f"SELECT order_id, charge_id, shipped_at = '2026-01-01Z' FROM {schema}.shipments"
    assert ask(admin, shipped) == [(1, None, True)]


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


@pytest.mark.parametrize(
    "table",
    ["processed_messages", "outbox_messages", "dead_letters", "barriers", "barrier_members", "ticks"],
)
def test_a_migrated_table_is_what_the_middleware_makes_of_its_model(
    servers: Servers, admin: extensions.connection, schema: str, table: str
) -> None:
    # Given the tables of the migrations, and those that the middleware makes in another schema
    broker = broker_in(schema)
    with closing(database):
        made_tables = make_tables(broker)
    assert table in made_tables

    # When both are looked up in the catalogue
    migrated, made = (
        [ask(admin, query, name, table) for query in (COLUMNS, CONSTRAINTS, INDEXES, OPTIONS)]
        for name in ("public", schema)
    )

    # Then columns, constraints, indexes and options agree
    assert migrated == made


def broker_in(schema: str) -> DurableRedisBroker:
    """A broker whose models are twins of ours in another schema."""

    models = tables.on(database, schema=schema)
    broker = DurableRedisBroker(url=os.environ["REDIS_URL"], middleware=[], ledger=models)
    broker.add_middleware(IdempotentConsumer(models.ProcessedMessage))
    return broker


def test_one_index_lies_on_the_inbox_for_messages_that_nothing_set_off(
    servers: Servers, admin: extensions.connection
) -> None:
    # Given the migrated inbox, then it has this one constraint, and no other index but those for messages
    # that another one set off, or that carry a business key
    inbox = ("public", "processed_messages")
    key = "(consumer_name, message_id)"
    assert ask(admin, CONSTRAINTS, *inbox) == [(tables.KEY_CONSTRAINT, f"UNIQUE {key}")]
    assert ask(admin, INDEXES, *inbox) == [
        (tables.KEY_CONSTRAINT, f" USING btree {key}"),
        ("processed_messages_parent", " USING hash (parent_id) WHERE (parent_id IS NOT NULL)"),
        ("processed_messages_performer", " USING hash (performed_by) WHERE (performed_by <> message_id)"),
    ]


def test_dead_rows_of_the_ledger_are_cleared_away_early(
    servers: Servers, admin: extensions.connection
) -> None:
    # Given the migrated ledger, when its options are read
    ((options,),) = ask(admin, "SELECT reloptions FROM pg_class WHERE oid = 'outbox_messages'::regclass")

    # Then autovacuum comes after a few rows, not after a fifth of the table (T36)
    assert "autovacuum_vacuum_scale_factor=0.02" in options
