"""Under gevent, psycopg2 must hand the hub over while it waits (T7).

Without that, two greenlets with one key freeze the process for good: the INSERT of the second
blocks the hub, so that the first can never commit.
"""

from __future__ import annotations

import sys
from time import monotonic
from typing import Any

import psycopg2
from psycopg2 import extensions

from .errors import ConfigurationError

#: A connection in another state than these is still being made.
_MADE = (extensions.STATUS_READY, extensions.STATUS_BEGIN, extensions.STATUS_PREPARED)
#: Used where libpq's connect_timeout is not set; libpq itself applies it to blocking connects only.
_CONNECT_TIMEOUT_S = 10.0


def patched() -> bool:
    """Whether gevent patched the sockets of this process."""
    monkey = sys.modules.get("gevent.monkey")
    return monkey is not None and bool(monkey.is_module_patched("socket"))


def install() -> None:
    """Set the callback where gevent is patched and nobody has set one."""
    if patched() and extensions.get_wait_callback() is None:
        extensions.set_wait_callback(_wait)


def check() -> None:
    """A patched process has a callback.

    Raises:
      ConfigurationError: somebody removed it.
    """
    if patched() and extensions.get_wait_callback() is None:
        raise ConfigurationError(
            "gevent is patched and psycopg2 has no wait callback: two messages with one key would "
            "freeze this worker for good. Remove the call of "
            "psycopg2.extensions.set_wait_callback(None)."
        )


def _wait(connection: Any) -> None:
    from gevent.socket import wait_read, wait_write

    until_s = None
    if connection.status not in _MADE:
        timeout_s = float(connection.info.dsn_parameters.get("connect_timeout") or _CONNECT_TIMEOUT_S)
        until_s = monotonic() + timeout_s
    while (state := connection.poll()) != extensions.POLL_OK:
        wait = wait_read if state == extensions.POLL_READ else wait_write
        if until_s is None or connection.status in _MADE:
            wait(connection.fileno())
        else:
            late = psycopg2.OperationalError("PostgreSQL did not answer within connect_timeout")
            wait(
                connection.fileno(),
                timeout=max(until_s - monotonic(), 0.001),
                timeout_exc=late,
            )
