"""The servers that a command works with: the configured ones, embedded where there are none."""

from __future__ import annotations

import os
import sys
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import settings
from embedded import Folder, PostgreSQL, Server, Valkey

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def servers(folder: AbstractContextManager[Folder]) -> Iterator[list[Server]]:
    """Start a server for each URL that is not configured; the settings know its address then.

    It must be entered before anything imports the models or the actors.

    Arguments:
      folder: where the servers keep their data; made only if there is a server to start.
    """
    with ExitStack() as stack:
        started: list[Server] = []
        if settings.DATABASE_URL is None or settings.REDIS_URL is None:
            home = stack.enter_context(folder)
            if settings.DATABASE_URL is None:
                _forget_the_servers_of_the_shell()
                started.append(stack.enter_context(PostgreSQL(home)))
                settings.DATABASE_URL = started[-1].url
            if settings.REDIS_URL is None:
                started.append(stack.enter_context(Valkey(home)))
                settings.REDIS_URL = started[-1].url
        yield started


def _forget_the_servers_of_the_shell() -> None:
    """Else libpq would take PGPORT, PGSERVICE and the like for this server too."""
    for name in [name for name in os.environ if name.startswith("PG") and name != "PGBOUNCER"]:
        del os.environ[name]


def environment() -> dict[str, str]:
    """The variables for a process that works with the same servers and the same programs as we."""
    return {
        **os.environ,
        "DATABASE_URL": settings.DATABASE_URL or "",
        "REDIS_URL": settings.REDIS_URL or "",
        "REDIS_NAMESPACE": settings.REDIS_NAMESPACE,
        "HEARTBEAT_TIMEOUT_MS": str(settings.HEARTBEAT_TIMEOUT_MS),
        "PORT": str(settings.PORT),
        "PAYMENTS_PORT": str(settings.PAYMENTS_PORT),
        "PAYMENTS_URL": settings.PAYMENTS_URL,
        "PAYMENTS_TIMEOUT_MS": str(settings.PAYMENTS_TIMEOUT_MS),
        "PAYMENTS_FILE": settings.PAYMENTS_FILE,
        "PYTHONUNBUFFERED": "1",
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
    }
