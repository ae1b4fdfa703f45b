"""The one database of this application; importing it connects to nothing."""

from __future__ import annotations

import settings
from middleware import Database

#: One connection per thread or greenlet, opened by its first statement. Without a DATABASE_URL
#: that statement raises `ConfigurationError` and names the variable.
database = Database(
    settings.DATABASE_URL,
    lock_timeout_ms=settings.LOCK_TIMEOUT_MS,
    idle_limit_ms=settings.IDLE_LIMIT_MS,
    transaction_timeout_ms=settings.TRANSACTION_TIMEOUT_MS,
    connect_timeout_s=settings.CONNECT_TIMEOUT_S,
    keepalives_idle_s=settings.KEEPALIVES_IDLE_S,
    keepalives_interval_s=settings.KEEPALIVES_INTERVAL_S,
    keepalives_count=settings.KEEPALIVES_COUNT,
    pgbouncer=settings.PGBOUNCER,
)
