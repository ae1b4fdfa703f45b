"""The inbox: the key that a transaction inserts first, and what stands under it already."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from . import payload
from .tables import KEY_CONSTRAINT, ProcessedMessage

if TYPE_CHECKING:
    from .connection import GuardedConnection
    from .database import Database
    from .errors import TransactionEscaped


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


class Inbox:
    """The statements on one application's table of processed messages."""

    def __init__(self, model: type[ProcessedMessage]) -> None:
        self.model = model
        meta = model._meta
        self.database: Database = meta.database
        table = ".".join(f'"{part}"' for part in (meta.schema, meta.table_name) if part)
        columns = "consumer_name, message_id, performed_by, payload_digest, digest_version"
        conflict = f'ON CONFLICT ON CONSTRAINT "{KEY_CONSTRAINT}" DO NOTHING'  # T12
        self.insert = f"INSERT INTO {table} ({columns}) VALUES (%s, %s, %s, %s, %s) {conflict}"
        prepared = self.insert.replace("%s, %s, %s, %s, %s", "$1, $2, $3, $4, $5")
        self.prepare = f"PREPARE onetake_claim (text, text, text, bytea, smallint) AS {prepared}"
        self.execute = "EXECUTE onetake_claim (%s, %s, %s, %s, %s)"
        where = "WHERE consumer_name = %s AND message_id = %s"
        self.select = f"SELECT performed_by, payload_digest, digest_version, result FROM {table} {where}"
        self.update_result = f"UPDATE {table} SET result = %s {where}"

    def parameters(self, claim: Claim) -> tuple[str, str, str, str, int]:
        """The values of `insert`, as psycopg2 sends them."""
        digest = "\\x" + claim.digest.hex()
        return claim.consumer_name, claim.key, claim.performed_by, digest, payload.DIGEST_VERSION

    def look_up(self, consumer_name: str, key: str) -> Processed | None:
        """What is committed under a key, None if nothing is; in the caller's transaction."""
        row = self.database.execute_sql(self.select, (consumer_name, key)).fetchone()
        if row is None:
            return None
        performed_by, digest, version, result = row
        return Processed(performed_by, bytes(digest), version, result)

    def store_result(self, claim: Claim, result: Any) -> None:
        """Write the result beside the key, in the transaction of the claim.

        Raises:
          InvalidResult: it cannot be stored (T13).
        """
        of = f"message {claim.performed_by!r} for consumer {claim.consumer_name!r}"
        text = payload.result_as_json(result, of)
        self.database.execute_sql(self.update_result, (text, claim.consumer_name, claim.key))
