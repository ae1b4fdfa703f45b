"""What the tests of dead letters share: odd messages, how they come, and what becomes of them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from .processes import eventually

if TYPE_CHECKING:
    from dramatiq import Message

    from .ledger_stage import LedgerStage

COLUMNS = [
    "id",
    "message_id",
    "consumer_name",
    "actor_name",
    "queue_name",
    "arguments",
    "options",
    "message",
    "reason",
    "error_class",
    "error_text",
    "traceback",
    "attempt",
    "attempts",
    "sent_at",
    "died_at",
]


def letters(ledger: LedgerStage) -> list[dict[str, Any]]:
    """All dead letters with all that is known of them."""
    rows = ledger.sql(f"SELECT {', '.join(COLUMNS)} FROM dead_letters ORDER BY id")
    return [dict(zip(COLUMNS, row, strict=True)) for row in rows]


def the_letter(ledger: LedgerStage) -> dict[str, Any]:
    """Wait for the one dead letter, whose message Redis and the ledger have let go."""
    eventually(lambda: len(letters(ledger)) == 1, what=lambda: letters(ledger))
    expect_nothing_left(ledger)
    (letter,) = letters(ledger)
    return letter


def expect_nothing_left(ledger: LedgerStage) -> None:
    """Wait until nothing is owed, and the queue is empty; some of it may be no message."""
    eventually(lambda: not ledger.sql("SELECT 1 FROM outbox_messages"))
    eventually(lambda: not ledger.redis.hlen("stage:default.msgs"))


def raw_of(message: Message[Any], **fields: Any) -> bytes:
    """A message as another client may have encoded it."""
    return json.dumps(message.asdict() | fields).encode()


def put(ledger: LedgerStage, *raws: bytes) -> None:
    """Put encoded messages into the queue, all at one moment, so that one fetch brings them."""
    with ledger.redis.pipeline(transaction=True) as pipe:
        for number, raw in enumerate(raws):
            pipe.hset("stage:default.msgs", f"put-{number}", raw)
            pipe.rpush("stage:default", f"put-{number}")
        pipe.execute()


def owe(ledger: LedgerStage, message: Message[Any], raw: bytes) -> None:
    """Let the ledger owe these bytes."""
    ledger.send(message)
    ledger.sql("UPDATE outbox_messages SET message = %s WHERE message_id = %s", raw, message.message_id)
