"""The ledger: what is owed and not yet done is a row, whatever becomes of Redis.

A message that is sent inside a transaction is written here by that transaction and deleted by the
one that inserts its key. In between it waits here: for its time, for the relay, for a retry. A
message that fails for good moves on to the dead letters.
"""

from __future__ import annotations

import json
import traceback
from typing import TYPE_CHECKING, Any, NamedTuple

import psycopg2
from dramatiq import Message, get_encoder

from . import payload
from .delivery import Owed
from .errors import ConfigurationError, MessageTooLarge
from .inbox import table_of
from .sagas import undo_of
from .tables import OWED_CONSTRAINT, Barrier, BarrierMember, DeadLetter, OutboxMessage, Tick

if TYPE_CHECKING:
    from collections.abc import Iterable

    import peewee

    from .database import Database


class Row(NamedTuple):
    """A row of the ledger as the relay sees it."""

    owed: Owed
    queue_name: str
    size: int = 0
    message: bytes = b""


class Ledger:
    """The statements on the tables of one application.

    Arguments:
      models: the concrete models of `tables`, in any order; those of the keys may be among them.
      max_message_bytes: larger messages are refused where they are sent.

    Raises:
      ConfigurationError: one is missing.
    """

    def __init__(self, models: Iterable[type[peewee.Model]], max_message_bytes: int) -> None:
        models = list(models)
        self.outbox = _model(models, OutboxMessage)
        self.dead_letters = _model(models, DeadLetter)
        self.barriers = _model(models, Barrier)
        self.barrier_members = _model(models, BarrierMember)
        self.ticks = _model(models, Tick)
        self.database: Database = self.outbox._meta.database
        self.max_message_bytes = max_message_bytes
        table = self.table = table_of(self.outbox)
        columns = "message_id, actor_name, queue_name, attempt, message, due_at, parent_id"
        values = "%s, %s, %s, %s, %s, clock_timestamp() + make_interval(secs => %s), %s"
        insert = f"INSERT INTO {table} AS owed ({columns}) VALUES ({values}) ON CONFLICT"
        on_key = f'ON CONSTRAINT "{OWED_CONSTRAINT}"'
        self.insert = f"{insert} {on_key} DO NOTHING"
        self.replace = (
            f"{insert} {on_key} DO UPDATE SET attempt = excluded.attempt, message = excluded.message, "
            f"due_at = excluded.due_at, published_at = NULL, refused = NULL "
            f"WHERE owed.attempt < excluded.attempt"
        )
        self.replace_at = self.replace.replace(
            "clock_timestamp() + make_interval(secs => %s)", "greatest(clock_timestamp(), to_timestamp(%s))"
        )
        # Rows come and go all the time.
        self.vacuum_early = (
            f"ALTER TABLE {table} SET (autovacuum_vacuum_scale_factor = 0.02, "
            f"autovacuum_vacuum_threshold = 1000)"
        )
        of_row = "WHERE message_id = %s AND actor_name = %s"
        self.delete = f"DELETE FROM {table} {of_row} AND attempt <= %s"
        batch = "(SELECT unnest(%s::text[]), unnest(%s::text[]), unnest(%s::int[]))"
        # Without statistics the planner would sort the whole backlog for each batch.
        ordered = "; ".join(f"SET LOCAL enable_{way} = off" for way in ("seqscan", "bitmapscan", "sort"))
        self.mark = (
            f"{ordered}; UPDATE {table} owed SET published_at = now(), refused = NULL "
            f"FROM (SELECT message_id, actor_name FROM {table} WHERE published_at IS NULL "
            f"AND due_at <= now() - make_interval(secs => %s) AND queue_name <> ALL(%s::text[]) "
            f"ORDER BY due_at LIMIT %s FOR UPDATE SKIP LOCKED) due "
            f"WHERE (owed.message_id, owed.actor_name) = (due.message_id, due.actor_name) "
            f"RETURNING owed.message_id, owed.actor_name, owed.attempt, owed.queue_name, "
            f"octet_length(owed.message), owed.due_at"
        )
        # T38: rows that a running claim has deleted are passed over, here as in `mark`.
        self.unmark = (
            f"UPDATE {table} owed SET published_at = NULL, "
            f"due_at = greatest(due_at, now() + make_interval(secs => %s::float8)) "
            f"FROM (SELECT message_id, actor_name FROM {table} "
            f"WHERE (message_id, actor_name, attempt) IN {batch} AND published_at IS NOT NULL "
            f"FOR UPDATE SKIP LOCKED) lost "
            f"WHERE (owed.message_id, owed.actor_name) = (lost.message_id, lost.actor_name)"
        )
        self.refuse = (
            f"UPDATE {table} SET published_at = NULL, refused = %s, due_at = now() + interval '1 minute' "
            f"{of_row} AND attempt = %s"
        )
        self.messages = (
            f"SELECT message_id, actor_name, attempt, message FROM {table} "
            f"WHERE (message_id, actor_name, attempt) IN {batch}"
        )
        barriers, members = table_of(self.barriers), table_of(self.barrier_members)
        self.insert_barrier = (
            f"WITH barrier AS (INSERT INTO {barriers} (barrier_id, waiting, callbacks) "
            f"VALUES (%s, %s, %s) ON CONFLICT DO NOTHING RETURNING barrier_id) "
            f"INSERT INTO {members} (message_id, barrier_id) "
            f"SELECT unnest(%s::text[]), barrier_id FROM barrier"
        )
        # Members that end at the same moment wait for each other here, so one of them is the last.
        self.count_down = (
            f"WITH arrived AS (DELETE FROM {members} WHERE message_id = %s RETURNING barrier_id) "
            f"UPDATE {barriers} barrier SET waiting = waiting - 1 FROM arrived "
            f"WHERE barrier.barrier_id = arrived.barrier_id RETURNING waiting, callbacks"
        )
        self.published = (
            f"SELECT message_id, actor_name, attempt, queue_name FROM {table} "
            f"WHERE published_at < now() - make_interval(secs => %s)"
        )

    # What is owed

    def check_size(self, message: Message[Any]) -> bytes:
        """A message of at most `max_message_bytes` passes, and is returned encoded.

        Raises:
          MessageTooLarge: says what to do instead.
        """
        data = message.encode()
        if len(data) > self.max_message_bytes:
            raise MessageTooLarge(
                f"Message {message.message_id!r} of actor {message.actor_name!r} has {len(data)} bytes; "
                f"{self.max_message_bytes} are allowed (max_message_bytes). Store what is large, and send "
                f"its id."
            )
        return data

    def values_of(
        self, message: Message[Any], delay_ms: float, parent_id: str | None = None
    ) -> tuple[Any, ...]:
        """The values of `insert` for a message that is sent.

        Arguments:
          parent_id: the message that set it off, None where none did.

        Raises:
          MessageTooLarge: the encoded message has more bytes than are allowed.
          InvalidKey: its id cannot be stored.
        """
        payload.valid_key(message.message_id, "The message id", f"a message of actor {message.actor_name!r}")
        return (*_names_of(message), 0, self.check_size(message), delay_ms / 1_000, parent_id)

    def owe(self, values: tuple[Any, ...]) -> None:
        """Write a message down, in the caller's transaction or in one of its own."""
        self.database.execute_sql(self.insert, values)

    def owe_again(
        self, attempt: int, message: Message[Any], delay_ms: float, parent_id: str | None = None
    ) -> None:
        """Write down what follows an attempt; once, however often that attempt was delivered."""
        values = (*_names_of(message), attempt + 1, message.encode(), delay_ms / 1_000, parent_id)
        self.database.execute_sql(self.replace, values)

    def is_late(self, owed: Owed) -> bool:
        """Whether a delivery is a late copy: its row is gone, and its message a dead letter by now.

        A message that was sent again under the same id has a row.
        """
        these = "message_id = %s AND actor_name = %s AND attempt"
        text = (
            f"SELECT 1 WHERE EXISTS (SELECT 1 FROM {table_of(self.dead_letters)} WHERE {these} >= %s) "
            f"AND NOT EXISTS (SELECT 1 FROM {self.table} WHERE {these} <= %s)"
        )
        return self.database.execute_sql(text, (*owed, *owed)).fetchone() is not None

    def waits_for(self, message_id: str) -> bool:
        """Whether a message, or what comes before it in its pipeline, leaves with the open transaction."""
        # A later step of a pipeline stands in the first. Of the rows that were written since this
        # transaction began, those are its own whose writer is still in progress.
        own = "published_at IS NULL AND due_at >= now() AND sent_at >= now()"
        writer = "(pg_current_xact_id()::text::bigint - age(xmin))::text::xid8"
        own += f" AND pg_xact_status({writer}) = 'in progress'"
        text = f"SELECT 1 FROM {self.table} WHERE {own} AND position(%s::bytea IN message) > 0"
        return self.database.execute_sql(text, (message_id.encode(),)).fetchone() is not None

    def owe_later(self, message: Message[Any], owed: Owed | None) -> None:
        """Write down what came with an ``eta``: milliseconds by the sender's clock (T39).

        Arguments:
          owed: the row that it came from, which is then replaced.
        """
        options = dict(message.options)
        eta = options.pop("eta", None)
        eta_s = eta / 1_000 if type(eta) in (int, float) else 0.0
        queue_name = message.queue_name.removesuffix(".DQ")
        due = message._replace(options=options, queue_name=queue_name)
        attempt = 0 if owed is None else owed.attempt + 1
        self.database.execute_sql(self.replace_at, (*_names_of(due), attempt, due.encode(), eta_s, None))

    def forget(self, owed: Owed) -> bool:
        """Delete the row of a message that is done, unless a later attempt took its place.

        Returns:
          Whether it was there; if not, another delivery has ended the message.
        """
        return bool(self.database.execute_sql(self.delete, owed).rowcount)

    # What groups wait for

    def barrier_of(
        self, barrier_id: str, member_ids: list[str], callbacks: list[dict[str, Any]]
    ) -> tuple[str, tuple[Any, ...]]:
        """The statement that writes a barrier and its members, unless it is there, and its values."""
        data = get_encoder().encode({"callbacks": callbacks})
        return self.insert_barrier, (barrier_id, len(member_ids), data, member_ids)

    def arrive(self, message_id: str) -> list[Message[Any]]:
        """Count a member down, once, in the caller's transaction.

        Returns:
          The completion callbacks of the groups whose last member it was.
        """
        rows = self.database.execute_sql(self.count_down, (message_id,)).fetchall()
        complete = [bytes(data) for waiting, data in rows if waiting == 0]
        return [Message(**one) for data in complete for one in get_encoder().decode(data)["callbacks"]]

    # What the relay does

    def take_due(self, limit: int, overdue_s: float, full: list[str]) -> list[Row]:
        """Mark rows that are due as published, and return them, the longest due first.

        Arguments:
          limit: how many at most.
          overdue_s: leave those alone that have not been due for so long.
          full: queues that Redis has enough of.
        """
        rows = self.database.execute_sql(self.mark, (overdue_s, full, limit)).fetchall()
        rows.sort(key=lambda row: row[-1])
        return [Row(Owed(*row[:3]), row[3], row[4]) for row in rows]

    def with_messages(self, rows: list[Row]) -> list[Row]:
        """Rows together with their messages, read without a lock; those that have gone are left out."""
        columns = [list(column) for column in zip(*(row.owed for row in rows), strict=True)]
        found = self.database.execute_sql(self.messages, columns).fetchall()
        messages = {Owed(*row[:3]): bytes(row[3]) for row in found}
        return [row._replace(message=messages[row.owed]) for row in rows if row.owed in messages]

    def give_back(self, owed: Iterable[Owed], later_s: float | None = None) -> int:
        """Unmark rows that did not reach Redis, or are no longer there; returns how many were.

        Arguments:
          later_s: not before so many seconds from now; None: they are due as they were.
        """
        columns: list[Any] = [list(column) for column in zip(*owed, strict=True)]
        if not columns:
            return 0
        return int(self.database.execute_sql(self.unmark, [later_s, *columns]).rowcount)

    def set_aside(self, owed: Owed, reason: str) -> None:
        """A row that Redis cannot take stops nobody; it is tried again in a minute."""
        self.database.execute_sql(self.refuse, (_storable(reason), *owed))

    def on_their_way(self, older_than_s: float) -> list[Row]:
        """The rows that are published and not done, without their messages."""
        rows = self.database.execute_sql(self.published, (older_than_s,)).fetchall()
        return [Row(Owed(*row[:3]), row[3]) for row in rows]

    # What is dead

    def undo(self, message: Message[Any]) -> None:
        """Send what undoes the steps before a message that has failed for good, if anything does."""
        undo = undo_of(message)
        if undo is not None:
            self.owe(self.values_of(undo, 0, message.message_id))

    def bury(self, letter: dict[str, Any], owed: Owed | None, message: Message[Any] | None) -> None:
        """Write a dead letter, made by `letter_of`, in the caller's transaction.

        Arguments:
          owed: the row that the message has so far.
          message: the message if it could be read; what undoes the steps before it leaves with the
            dead letter.
        """
        if owed is not None:
            row = self.outbox.select(self.outbox.parent_id).where(
                (self.outbox.message_id == owed.message_id) & (self.outbox.actor_name == owed.actor_name)
            )
            letter = letter | {"parent_id": row}
        self.dead_letters.insert(letter).execute()
        if message is not None:
            self.undo(message)

    def divert(self, owed: Owed | None, letter: dict[str, Any], message: Message[Any] | None = None) -> None:
        """Bury a message that cannot be performed at all, and end its row, in one transaction."""
        if owed is not None:
            names = {"message_id": _storable(owed.message_id), "actor_name": _storable(owed.actor_name)}
            letter = names | letter
            letter["attempt"] = owed.attempt
        with self.database.atomic():
            self.bury(letter, owed, message)
            if owed is not None:
                self.forget(owed)


def letter_of(
    raw: bytes,
    queue_name: str,
    message: Message[Any] | None,
    reason: str,
    error: BaseException | None,
    *,
    consumer_name: str | None = None,
    attempt: int = 0,
    attempts: int = 0,
) -> dict[str, Any]:
    """The columns of a dead letter, storable whatever the message holds (T13)."""
    letter: dict[str, Any] = {
        "queue_name": _storable(queue_name),
        "message": raw,
        "reason": reason,
        "attempt": attempt,
        "attempts": attempts,
        "consumer_name": _storable(consumer_name),
    }
    if error is not None:
        letter["error_class"] = type(error).__name__
        letter["error_text"] = _storable("".join(traceback.format_exception_only(error)).strip())
        letter["traceback"] = _storable("".join(traceback.format_exception(error, limit=30)))
    if message is not None:
        letter |= {
            "message_id": _storable(str(message.message_id)),
            "actor_name": _storable(str(message.actor_name)),
            "arguments": _as_text({"args": message.args, "kwargs": message.kwargs}),
            "options": _as_text(message.options),
        }
        # The sender's clock, and nothing computes with it.
        if type(message.message_timestamp) in (int, float) and 0 <= message.message_timestamp < 1e14:
            letter["sent_at"] = psycopg2.TimestampFromTicks(message.message_timestamp / 1_000)
    return letter


def _names_of(message: Message[Any]) -> tuple[str, str, str]:
    return message.message_id, message.actor_name, message.queue_name


def _as_text(value: Any) -> str:
    try:
        return json.dumps(value, default=repr, skipkeys=False)
    except (TypeError, ValueError, RecursionError):
        return json.dumps(repr(value))


def _storable(text: str | None) -> str | None:
    """A text that PostgreSQL can store: NUL and lone surrogates are written out."""
    if text is None:
        return None
    return text.replace("\0", "\\x00").encode("utf-8", "backslashreplace").decode()


def _model(models: list[type[peewee.Model]], kind: type[Any]) -> type[Any]:
    for model in models:
        if issubclass(model, kind):
            return model
    raise ConfigurationError(
        f"The ledger lacks a model: hand DurableRedisBroker ledger=tables.on(database), or a tuple of "
        f"models with a subclass of tables.{kind.__name__} on your database among them."
    )
