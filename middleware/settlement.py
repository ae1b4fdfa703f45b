"""The one place where a delivery that did not commit becomes safe: its end is a row.

A retry, a dead letter, a message that is skipped or answered: each ends the message's row in the
ledger, together with whatever the hooks sent after the body had failed. The acknowledgement comes
afterwards. Without a ledger the ends are Dramatiq's own, in Redis.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from dramatiq import Message
from dramatiq.errors import ActorNotFound
from dramatiq.middleware import SkipMessage

from . import payload
from .delivery import current
from .errors import (
    InvalidKey,
    NotDecided,
    PayloadMismatch,
    PermanentError,
    TransactionEscaped,
)
from .inbox import Claim
from .ledger import letter_of
from .performer import Performer

if TYPE_CHECKING:
    from .broker import DurableRedisBroker
    from .delivery import Delivery
    from .idempotent import IdempotentConsumer
    from .ledger import Ledger

logger = logging.getLogger("onetake")


def settle(broker: DurableRedisBroker, delivery: Delivery) -> None:
    """Make the end of a delivery safe, then mark it settled; the thread waits for the database.

    Afterwards the delivery is settled, dead (a dead letter for Redis to keep) or given back: the
    worker stops, or there is no end.
    """
    current.collects = None
    undecided = not (delivery.failed or delivery.retry or delivery.done)
    if undecided and delivery._exception is not None:
        delivery.fail()
        logger.error(
            "Message %r of actor %r failed, and nothing in the middleware stack stored a retry or failed "
            "it: it is a dead letter (NotDecided). Add Dramatiq's Retries, or mend retry_when",
            delivery.message_id,
            delivery.actor_name,
        )
        delivery.stuff_exception(NotDecided(f"{delivery._exception!r} was neither retried nor failed"))
    elif undecided:
        delivery.given_back = True
        return
    ledger = broker.ledger
    if ledger is None:
        delivery.dead = delivery.failed
        delivery.settled = not delivery.failed
        return
    guard = broker.guard
    try:
        delivery.settled = guard.insist(lambda: _store(broker, ledger, guard, delivery))
    except Exception as unfit:  # noqa: BLE001 - whatever cannot be stored is one dead letter (T13)
        logger.error("The end of message %r cannot be stored: %r", delivery.message_id, unfit)
        letter = letter_of(delivery.raw, delivery.queue_name, None, "cannot be stored", unfit)
        delivery.settled = guard.insist(lambda: ledger.divert(delivery.owed, letter, delivery._message))
    delivery.given_back = not delivery.settled


def _store(
    broker: DurableRedisBroker,
    ledger: Ledger,
    guard: IdempotentConsumer,
    delivery: Delivery,
) -> None:
    """Everything that ends a delivery, in one transaction."""
    with ledger.database.atomic():
        if delivery.owed is not None and not delivery.done and ledger.is_late(delivery.owed):
            return  # a late copy: its retries and its dead letter were written long ago
        if delivery.failed and not _bury(broker, ledger, guard, delivery):
            delivery.sent.clear()  # the work is done, or cancelled: nothing that mourns it leaves
        if not delivery.failed and delivery.retry is not None:
            ledger.owe_again(delivery.attempt, *delivery.retry)
        elif delivery.owed is None or ledger.forget(delivery.owed):
            _follow(broker, ledger, delivery)
        for statement in delivery.sent:
            ledger.database.execute_sql(*statement)
        if delivery.sent:
            broker.wake_after_commit()


def _follow(broker: DurableRedisBroker, ledger: Ledger, delivery: Delivery) -> None:
    """Send what a delivery sets off that had no transaction of its own, or was cancelled."""
    if delivery.cancelled:
        ledger.undo(delivery._message)
    elif delivery.follows:
        performer: Any = broker.actors[delivery.actor_name].fn
        current.delivery = delivery  # the parent of what follows
        try:
            performer.set_off(delivery, delivery.result)
        finally:
            current.delivery = None


def _bury(
    broker: DurableRedisBroker,
    ledger: Ledger,
    guard: IdempotentConsumer,
    delivery: Delivery,
) -> bool:
    """Write the dead letter; not where another delivery has done the work meanwhile."""
    error = delivery._exception
    actor = broker.actors.get(delivery.actor_name)
    consumer = actor.fn if actor is not None and isinstance(actor.fn, Performer) else None
    exempt = isinstance(error, PayloadMismatch | TransactionEscaped)
    if consumer is not None and consumer.keyed and not exempt:
        claim = _claim_of(guard, consumer, delivery)
        if claim is not None and guard.inbox.is_taken(claim):
            return False
    letter = letter_of(
        delivery.raw,
        delivery.queue_name,
        delivery._message,
        _reason_of(error),
        error,
        consumer_name=consumer.name if consumer is not None else None,
        attempt=delivery.attempt,
        attempts=int(Message.decode(delivery.raw).options.get("retries", 0)) + 1,
    )
    ledger.bury(letter, delivery.owed, delivery._message)
    return True


def _claim_of(guard: IdempotentConsumer, consumer: Performer, delivery: Delivery) -> Claim | None:
    try:
        key = payload.key_of(delivery._message, consumer.name)
    except InvalidKey:
        return None  # no work can have been done under it
    return Claim(guard.inbox, consumer.name, key, delivery.message_id, b"", guard.database.limits)


def _reason_of(error: BaseException | None) -> str:
    if isinstance(error, ActorNotFound):
        return "unknown actor"
    if isinstance(error, SkipMessage):
        return "skipped and failed"
    if isinstance(error, PermanentError):
        return "permanent error"
    return "no retry left" if error is not None else "failed by a middleware"
