"""Brings the tables of a database up to date with the numbered files in `migrations/`."""

from __future__ import annotations

from pathlib import Path

from playhouse.migrations import Runner

from middleware.errors import ConfigurationError

from .database import database

MIGRATIONS = Path(__file__).with_name("migrations")

#: Which advisory lock means "somebody migrates here": the word onetake in ASCII.
MIGRATION_LOCK = 0x6F6E6574616B65

#: What bounds a worker's transaction would stop a migration that fills a large table, or one that
#: waits for another migration. transaction_timeout exists from PostgreSQL 17 on.
LIMITS = [
    "lock_timeout",
    "statement_timeout",
    "idle_in_transaction_session_timeout",
    "transaction_timeout",
]


def migrate() -> list[str]:
    """Apply the migrations that this database does not have yet, all of them or none.

    Any number of processes may call it at once: the first migrates, the others wait for it and
    find nothing left to do (T26). The tables go into the first schema of the search_path. It runs
    in a transaction of its own, without the limits that hold for workers.

    Returns:
      The names of the migrations that were applied, in order; empty if there was nothing to do.

    Raises:
      ConfigurationError: no database is configured, or its search_path names no schema that exists.
    """
    # Whoever waited for the lock must see what was committed meanwhile, whatever isolation level
    # the server has as its default.
    with database.atomic("READ COMMITTED"):
        # Local to the transaction, so that it works behind pgbouncer and leaves nothing behind.
        database.execute_sql(
            "SELECT set_config(name, '0', true) FROM pg_settings WHERE name = ANY(%s)", (LIMITS,)
        )
        database.execute_sql("SELECT pg_advisory_xact_lock(%s)", (MIGRATION_LOCK,))
        _require_schema()
        applied: list[str] = Runner(database, str(MIGRATIONS)).up()
    return applied


def _require_schema() -> None:
    schema, search_path = database.execute_sql(
        "SELECT current_schema(), current_setting('search_path')"
    ).fetchone()
    if schema is None:
        raise ConfigurationError(
            f"The search_path {search_path} of DATABASE_URL names no schema that exists. "
            f"Create it (CREATE SCHEMA ...) or name another one."
        )
