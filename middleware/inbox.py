"""The inbox: the key that a transaction inserts first, and what stands under it already."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from . import payload
from .tables import KEY_CONSTRAINT, ProcessedMessage

if TYPE_CHECKING:
    import peewee

    from .connection import GuardedConnection
    from .database import Database
    from .delivery import Owed
    from .errors import TransactionEscaped


#: The digest_version of a key that a cancellation took.
CANCELLED = 0


class Stage(IntEnum):
    """How far the transaction of a claim came."""

    NOT_BEGUN = 0
    OPEN = 1
    COMMITTING = 2
    COMMITTED = 3


@dataclass(slots=True)
class Limits:
    """What a body may take, in milliseconds; 0 means no limit."""

    idle_ms: int
    transaction_ms: int


@dataclass(slots=True)
class Claim:
    """One attempt at one key, and what became of its transaction.

    The database fills in the lower half while it begins and ends the transaction; `ends.judge`
    reads it.
    """

    inbox: Inbox
    consumer_name: str
    key: str
    performed_by: str
    digest: bytes
    limits: Limits
    #: The row of the ledger that the claim deletes.
    owed: Owed | None = None

    stage: Stage = Stage.NOT_BEGUN
    connection: GuardedConnection | None = None
    began_at_s: float = 0.0
    #: A body that ended the transaction, or tried to, maybe without letting the error out (T3).
    escape: TransactionEscaped | None = None
    #: The connection is gone, and nobody here closed it.
    lost: bool = False
    #: The error that left nothing but a roll-back.
    aborted_by: BaseException | None = None
    #: How long the last statement took, how silent the body had been before it, and how old the
    #: transaction was after it.
    last_statement_ms: float = 0.0
    silence_ms: float = 0.0
    age_ms: float = 0.0


@dataclass(slots=True)
class Processed:
    """What the inbox holds under a key."""

    performed_by: str
    digest: bytes
    digest_version: int
    result: Any


class KeyTaken(Exception):
    """The key is committed: this delivery is a duplicate. Carries what stands under the key."""

    def __init__(self, processed: Processed) -> None:
        super().__init__(processed)
        self.processed = processed


def table_of(model: type[peewee.Model]) -> str:
    """The quoted name of a model's table."""
    parts = model._meta.schema, model._meta.table_name
    return ".".join(f'"{part}"' for part in parts if part)


class Statement:
    """One statement, as text and as one that was prepared in a session."""

    def __init__(self, name: str, types: str, text: str) -> None:
        self.name = name
        self.text = text
        count = len(types.split(", "))
        numbered = text
        for number in range(1, count + 1):
            numbered = numbered.replace("%s", f"${number}", 1)
        self.prepare = f"PREPARE {name} ({types}) AS {numbered}"
        self.execute = f"EXECUTE {name} ({', '.join(['%s'] * count)})"


class Inbox:
    """The statements on one application's table of processed messages."""

    def __init__(self, model: type[ProcessedMessage]) -> None:
        self.model = model
        self.database: Database = model._meta.database
        table = table_of(model)
        columns = "consumer_name, message_id, performed_by, payload_digest, digest_version"
        conflict = f'ON CONFLICT ON CONSTRAINT "{KEY_CONSTRAINT}" DO NOTHING'  # T12
        insert = f"INSERT INTO {table} ({columns}) VALUES (%s, %s, %s, %s, %s) {conflict}"
        self.insert = Statement("onetake_claim", "text, text, text, bytea, smallint", insert)
        self.insert_owed = self.insert
        where = "WHERE consumer_name = %s AND message_id = %s"
        self.select = f"SELECT performed_by, payload_digest, digest_version, result FROM {table} {where}"
        self.update_result = f"UPDATE {table} SET result = %s {where}"

    def attach(self, delete: str) -> None:
        """Let the claim of an owed message delete its row of the ledger in the same statement.

        What that row knew of where the message came from stays beside the key.
        """
        types = "text, text, int, text, text, text, bytea, smallint"
        self.insert_owed = Statement("onetake_claim_owed", types, self.insert_after(delete))

    def insert_after(self, delete: str, returning: str = "parent_id, sent_at") -> str:
        """The text that deletes a message's row and inserts its key, which keeps what the row knew."""
        known = "(SELECT parent_id FROM done), (SELECT sent_at FROM done)"
        insert = self.insert.text.replace("digest_version)", "digest_version, parent_id, sent_at)", 1)
        insert = insert.replace("%s)", f"%s, {known})", 1)
        return f"WITH done AS ({delete} RETURNING {returning}) {insert}"

    def inserting(self, claim: Claim) -> tuple[Statement, tuple[Any, ...]]:
        """The statement that takes a claim's key, and its values."""
        digest = "\\x" + claim.digest.hex()
        values = (
            claim.consumer_name,
            claim.key,
            claim.performed_by,
            digest,
            payload.DIGEST_VERSION,
        )
        if claim.owed is None:
            return self.insert, values
        return self.insert_owed, (*claim.owed, *values)

    def look_up(self, consumer_name: str, key: str) -> Processed | None:
        """What is committed under a key, None if nothing is; in the caller's transaction."""
        row = self.database.execute_sql(self.select, (consumer_name, key)).fetchone()
        if row is None:
            return None
        performed_by, digest, version, result = row
        return Processed(performed_by, bytes(digest), version, result)

    def is_taken(self, claim: Claim) -> bool:
        """Whether a key is committed, once a rival that is at work on it has ended.

        It takes the key and frees it again, in a savepoint of the caller's transaction.
        """
        with self.database.atomic() as savepoint:
            _, values = self.inserting(claim)
            taken = self.database.execute_sql(self.insert.text, values[-5:]).rowcount == 0
            savepoint.rollback()
        return bool(taken)

    def store_result(self, claim: Claim, result: Any) -> None:
        """Write the result beside the key, in the transaction of the claim.

        Raises:
          InvalidResult: it cannot be stored (T13).
        """
        of = f"message {claim.performed_by!r} for consumer {claim.consumer_name!r}"
        text = payload.result_as_json(result, of)
        self.database.execute_sql(self.update_result, (text, claim.consumer_name, claim.key))
