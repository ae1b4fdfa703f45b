"""What a person does with dead letters: look at them, requeue them, discard them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dramatiq import Message
from dramatiq.errors import DecodeError

from . import payload
from .errors import InvalidKey, InvalidMessage, NotRequeued, TransactionEscaped
from .sagas import undo_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .broker import DurableRedisBroker
    from .ledger import Ledger
    from .tables import DeadLetter

#: What an attempt leaves in the options; a requeued message begins anew.
_OF_AN_ATTEMPT = (
    "retries",
    "traceback",
    "requeue_timestamp",
    "eta",
    "redis_message_id",
)


def find(ledger: Ledger, ident: str) -> list[DeadLetter]:
    """The dead letters with this message id, or the one whose row has this id."""
    model = ledger.dead_letters
    which = model.message_id == ident
    if ident.isascii() and ident.isdigit() and len(ident) < 19:
        which |= model.id == int(ident)
    return list(model.select().where(which).order_by(model.id))


def newest(ledger: Ledger, limit: int | None) -> list[DeadLetter]:
    """The dead letters that died last, the newest first; all of them without a limit."""
    model = ledger.dead_letters
    return list(model.select().order_by(model.id.desc()).limit(limit))


def requeue(ledger: Ledger, letter: DeadLetter, *, force: bool = False) -> None:
    """Send a dead letter once more, in one transaction, under its own key.

    The key is kept, so that it doubles no effect that was made meanwhile. Its retries begin anew,
    its age is counted from now, and its attempt is above the last.

    Arguments:
      force: also one whose body may have committed without a key, or whose saga was undone.

    Raises:
      NotRequeued: with the reason.
    """
    if letter.error_class == TransactionEscaped.__name__ and not force:
        raise NotRequeued(
            f"Dead letter {letter.id} ended its own transaction, so its effect may stand without a key. Look "
            f"at the data first; then requeue it with force, or discard it."
        )
    try:
        message: Message[Any] = Message.decode(bytes(letter.message))
        options = {name: value for name, value in message.options.items() if name not in _OF_AN_ATTEMPT}
        payload.check_fields(message._replace(options=options))
        undone = undo_of(message)
    except (DecodeError, InvalidMessage, InvalidKey, AttributeError) as error:
        raise NotRequeued(f"Dead letter {letter.id} cannot be sent: {error} Discard it.") from error
    if undone is not None and not force:
        raise NotRequeued(
            f"Dead letter {letter.id} is a step of a saga: the steps before it are undone, beginning with "
            f"actor {undone.actor_name!r}. Run the pipeline again; or requeue it with force, and the steps "
            f"after it run although those before it were undone."
        )
    model = ledger.dead_letters
    with ledger.database.atomic():
        gone = model.delete().where(model.id == letter.id).returning(model.attempt).execute()
        if not list(gone):
            raise NotRequeued(f"Dead letter {letter.id} is gone: somebody requeued or discarded it.")
        now_ms = ledger.database.execute_sql("SELECT extract(epoch FROM clock_timestamp()) * 1000").fetchone()
        anew = message._replace(
            options=options,
            message_timestamp=int(now_ms[0]),
            queue_name=message.queue_name.removesuffix(".DQ"),
        )
        ledger.owe_again(letter.attempt, anew, 0, letter.parent_id)


def discard(ledger: Ledger, letter: DeadLetter) -> bool:
    """Delete a dead letter for good; False where it is gone already."""
    model = ledger.dead_letters
    return bool(model.delete().where(model.id == letter.id).execute())


def in_redis(broker: DurableRedisBroker) -> Iterator[dict[str, Any]]:
    """What lies in Dramatiq's own dead-letter queues, from the time before there was a ledger."""
    client: Any = broker.client
    for queue in sorted(broker.get_declared_queues()):
        name = f"{broker.namespace}:{queue}.XQ"
        for redis_id, died_ms in client.zrange(name, 0, -1, withscores=True):
            raw = client.hget(f"{name}.msgs", redis_id)
            if raw is not None:
                yield {
                    "id": redis_id.decode(),
                    "queue_name": queue,
                    "died_ms": int(died_ms),
                    "message": raw,
                }
