"""A schema, a namespace and a payment service for one run, on whatever servers there are."""

from __future__ import annotations

import secrets
import socket
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

import psycopg2
import redis
from psycopg2 import sql

import settings

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@contextmanager
def own_place() -> Iterator[None]:
    """Make a schema and a namespace, lead the settings there, and delete both in the end.

    It must be entered before anything imports the models or the actors. Nothing else on the
    servers is touched.
    """
    database_url, redis_url = settings.DATABASE_URL, settings.REDIS_URL
    assert database_url is not None
    assert redis_url is not None
    name = f"onetake_demo_{secrets.token_hex(4)}"
    with closing(redis.Redis.from_url(redis_url)) as client:
        client.ping()
        _execute(database_url, sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(name)))
        settings.DATABASE_URL = _with_search_path(database_url, name)
        settings.REDIS_NAMESPACE = name
        try:
            yield
        finally:
            _execute(database_url, sql.SQL("DROP SCHEMA {} CASCADE").format(sql.Identifier(name)))
            for key in client.scan_iter(match=f"{name}:*", count=1_000):
                client.unlink(key)


@contextmanager
def own_payments(folder: Path) -> Iterator[None]:
    """Lead the settings to a payment service that keeps its charges in a folder, on a port that is free."""
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        settings.PAYMENTS_PORT = probe.getsockname()[1]
    settings.PAYMENTS_URL = f"http://127.0.0.1:{settings.PAYMENTS_PORT}"
    settings.PAYMENTS_FILE = str(folder / "payments.sqlite")
    settings.PAYMENTS_TIMEOUT_MS = 1_000  # a charge that is not answered is soon asked for again
    yield


def _execute(url: str, statement: sql.Composed) -> None:
    with closing(psycopg2.connect(url, connect_timeout=settings.CONNECT_TIMEOUT_S)) as connection:
        connection.autocommit = True
        with connection.cursor() as cursor:
            # A server frees what a killed worker had locked as soon as it notices.
            cursor.execute("SET lock_timeout = '10s'")
            cursor.execute(statement)


def _with_search_path(url: str, schema: str) -> str:
    parts = urlsplit(url)
    query = dict(parse_qsl(parts.query))
    query["options"] = f"{query.get('options', '')} -csearch_path={schema}".strip()
    # libpq knows no + for a space.
    return parts._replace(query=urlencode(query, quote_via=quote)).geturl()
