"""What the tests of `manage.py dead-letters` share: dead letters, and the command line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from click.testing import CliRunner
from dramatiq import Message

from actors import reserve_stock
from manage import manage
from models import DeadLetter, OutboxMessage

if TYPE_CHECKING:
    from click.testing import Result


def run(*arguments: str) -> Result:
    """Run `manage.py dead-letters`; an error that is no sentence for the reader is the test's."""
    result = CliRunner().invoke(manage, ["dead-letters", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def bury(message: Message[Any] | None = None, raw: bytes | None = None, **columns: Any) -> DeadLetter:
    """A dead letter as a worker writes it."""
    if message is None:
        message = reserve_stock.message(1)
    values = {
        "message_id": message.message_id,
        "consumer_name": message.actor_name,
        "actor_name": message.actor_name,
        "queue_name": message.queue_name,
        "arguments": "{}",
        "options": "{}",
        "message": raw or message.encode(),
        "reason": "no retry left",
        "error_class": "ValueError",
        "attempt": 3,
        "attempts": 4,
    }
    letter: DeadLetter = DeadLetter.create(**{**values, **columns})
    return letter


def owed() -> list[tuple[str, int, Message[Any]]]:
    """What the ledger owes: message id, attempt and message."""
    rows = OutboxMessage.select().order_by(OutboxMessage.message_id)
    return [(row.message_id, row.attempt, Message.decode(bytes(row.message))) for row in rows]
