"""Cancelling a message: its key is taken before it can run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import peewee
import redis
from dramatiq import Message
from dramatiq.broker import MessageProxy
from dramatiq.results import Results

from . import payload
from .ends import LOCK_NOT_AVAILABLE, sqlstate_of
from .errors import Cancelled, ConfigurationError
from .inbox import CANCELLED
from .performer import Performer
from .stack import find
from .transaction import manual_transaction

if TYPE_CHECKING:
    from .broker import DurableRedisBroker
    from .inbox import Inbox
    from .ledger import Ledger


def cancel(broker: DurableRedisBroker, message: Message[Any]) -> bool:
    """Take the key of a message and delete its row, in one transaction: the caller's, or one of its own.

    The message then counts as failed: nothing that it was to set off leaves, its group does not
    complete, and whoever waits for its result gets an error. The steps before it are undone.

    Returns:
      True if it will not run, False if it has run or is running.

    Raises:
      ConfigurationError: the message's actor has no transaction that the key could stop, or the broker
        has no ledger.
    """
    performer = _performer_of(broker, message)
    ledger = broker.ledger
    if ledger is None:
        raise ConfigurationError("Without a ledger nothing can be cancelled: hand the broker ledger=(...).")
    key = payload.key_of(message, performer.name)
    try:
        with ledger.database.atomic() as transaction:
            row = _take(broker.guard.inbox, ledger, message, performer.name, key)
            if row is None:
                transaction.rollback()
                return False
            # The row knows what undoes the steps before it; the sender's copy does not.
            ledger.undo(message if row[0] is None else Message.decode(bytes(row[0])))
            if not isinstance(ledger.database.top_transaction(), manual_transaction):
                ledger.database.after_commit(lambda: _store_failure(broker, message))
    except peewee.OperationalError as error:
        if sqlstate_of(error) == LOCK_NOT_AVAILABLE:
            return False  # the delivery that runs has the key
        raise
    return True


def _performer_of(broker: DurableRedisBroker, message: Message[Any]) -> Performer:
    performer = broker.get_actor(message.actor_name).fn
    if not isinstance(performer, Performer) or performer.idempotency != "transaction":
        raise ConfigurationError(
            f"Message {message.message_id!r} of actor {message.actor_name!r} cannot be cancelled: its body "
            f"begins before its key is taken, so it may be running unseen. Only actors whose idempotency is "
            f'"transaction" can be cancelled.'
        )
    return performer


def _take(inbox: Inbox, ledger: Ledger, message: Message[Any], consumer_name: str, key: str) -> Any:
    """Take the key and delete the row, in the order in which a claim does; None if it was taken before."""
    delete = f"DELETE FROM {ledger.table} WHERE message_id = %s AND actor_name = %s"
    text = inbox.insert_after(delete, "message, parent_id, sent_at") + " RETURNING (SELECT message FROM done)"
    names = (message.message_id, message.actor_name)
    values = (*names, consumer_name, key, message.message_id, b"", CANCELLED)
    return ledger.database.execute_sql(text, values).fetchone()


def _store_failure(broker: DurableRedisBroker, message: Message[Any]) -> None:
    """Let whoever waits for the result know."""
    results = find(broker, Results)
    if results is None:
        return
    failed = MessageProxy(message)
    failed.fail()
    failed.stuff_exception(Cancelled(f"Message {message.message_id!r} was cancelled."))
    try:
        results.after_nack(broker, failed)
    except redis.RedisError as error:
        broker.outage.begins(error)
