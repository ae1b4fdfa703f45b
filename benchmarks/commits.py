"""How long a message is on its way from its commit to Redis: `python -m benchmarks.commits COUNT`.

It is a process of its own because the settings are read when they are imported. A relay must run,
and nobody may fetch. It prints the times in milliseconds as JSON.
"""

from __future__ import annotations

import json
import sys
from time import perf_counter
from typing import Any

from models import OutboxMessage, database

from .onetake import broker, with_sql

QUEUE = f"{broker.namespace}:{with_sql.queue_name}"
#: After so long, in seconds, a message counts as lost.
DEADLINE_S = 10


def commit_to_redis_ms() -> float:
    """Send one message in a transaction, and wait for its id in the list of its queue."""
    with database.atomic():
        message = with_sql.send("SKU-1", "key")
    committed = perf_counter()
    while not _pop().endswith(message.message_id.encode()):
        if perf_counter() > committed + DEADLINE_S:
            raise TimeoutError(f"Message {message.message_id} did not come within {DEADLINE_S} s.")
    arrived = perf_counter()
    # Else the audit would find out that we have stolen it, and publish it again.
    OutboxMessage.delete().execute()
    broker.client.delete(f"{QUEUE}.msgs")
    return 1_000 * (arrived - committed)


def _pop() -> bytes:
    """The next id; it may be one that the audit has put back meanwhile."""
    found: Any = broker.client.blpop([QUEUE], 1)
    return bytes(found[1]) if found else b""


if __name__ == "__main__":
    print(json.dumps([commit_to_redis_ms() for _ in range(int(sys.argv[1]))]))
