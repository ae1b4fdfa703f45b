"""The servers of the test session, and the environment that leads to them alone."""

from __future__ import annotations

import os
import re
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg2
import redis
from psycopg2 import sql

from embedded import PostgreSQL, Valkey, temporary_folder

if TYPE_CHECKING:
    from collections.abc import Iterator

PROJECT = Path(__file__).resolve().parent.parent

#: What else changes how libpq and Dramatiq behave.
FOREIGN_VARIABLES = ("PG", "dramatiq_")


@dataclass
class Servers:
    """Both servers: `servers.postgres.restart("immediate")`, `servers.redis.stop()`."""

    postgres: PostgreSQL
    redis: Valkey

    def start(self) -> None:
        """Start again what a test has stopped."""
        self.postgres.start()
        self.redis.start()

    def empty(self) -> None:
        """Delete all rows and all keys; the tables stay."""
        with redis.Redis.from_url(self.redis.url) as client:
            client.config_set("maxmemory", 0)
            client.flushall()
        connection = psycopg2.connect(self.postgres.url)
        try:
            with connection, connection.cursor() as cursor:
                # A transaction that a failed test forgot would make every later test wait.
                cursor.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                    "WHERE state LIKE 'idle in transaction%' AND pid <> pg_backend_pid()"
                )
                cursor.execute(
                    "SELECT tablename FROM pg_tables WHERE schemaname = 'public' "
                    "AND tablename NOT LIKE '%migration%'"
                )
                tables = [sql.Identifier(name) for (name,) in cursor.fetchall()]
                if tables:
                    cursor.execute(sql.SQL("TRUNCATE {} RESTART IDENTITY").format(sql.SQL(", ").join(tables)))
        finally:
            connection.close()


@contextmanager
def running_servers() -> Iterator[Servers]:
    """Start both servers in a folder that is deleted afterwards."""
    with (
        temporary_folder() as folder,
        PostgreSQL(folder) as postgres,
        Valkey(folder) as valkey,
    ):
        yield Servers(postgres, valkey)


def settings_variables() -> list[str]:
    """The names of all settings, as `.env.example` shows them."""
    example = (PROJECT / ".env.example").read_text()
    return sorted(set(re.findall(r"^#?([A-Z][A-Z_]+)=", example, re.MULTILINE)))


def use_in_environment(servers: Servers) -> None:
    """Point this process and its children to the servers, whatever `.env` and they say."""
    for name in list(os.environ):
        if name in settings_variables() or name.startswith(FOREIGN_VARIABLES):
            del os.environ[name]
    os.environ["ONETAKE_ENV_FILE"] = ""
    os.environ["DATABASE_URL"] = servers.postgres.url
    os.environ["REDIS_URL"] = servers.redis.url
    os.environ["REDIS_NAMESPACE"] = "tests"
