"""The guarded transaction: begun with its key, ended by nobody but itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import peewee
from psycopg2.extensions import TRANSACTION_STATUS_IDLE

from .connection import escaped
from .errors import TransactionAborted
from .inbox import Claim, Stage

if TYPE_CHECKING:
    from .connection import GuardedConnection
    from .database import Database

#: Turns psycopg2's errors into peewee's.
translated_errors: Any = vars(peewee)["__exception_wrapper__"]

#: What peewee's `manual_commit` opens.
manual_transaction: Any = vars(peewee)["_manual"]

#: psycopg2's connection.closed: 1 after close(), 2 when the connection was lost.
_LOST = 2


class GuardedTransaction(peewee._transaction):
    """What `Database.atomic(claim=...)` enters: the transaction of one delivery.

    On leaving it writes into the claim how the transaction stood, for `ends.judge`.

    Raises, on leaving:
      TransactionAborted: the body swallowed a database error (T2).
      TransactionEscaped: the body ended the transaction, or tried to (T3).
    """

    db: Any  # our Database

    def __init__(self, db: Database, claim: Claim) -> None:
        super().__init__(db, claim=claim)
        self.claim = claim

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        try:
            if exc_type is None:
                self._check_whole()
                self._commit()
        finally:
            if self.claim.stage is not Stage.COMMITTED:
                self._observe(exc_val)
                self._abandon()
        if exc_type is None:
            # One that raises does not undo a COMMIT that was confirmed: the stage tells (T26).
            self.db._run_commit_callbacks()

    @property
    def _connection(self) -> GuardedConnection:
        assert self.claim.connection is not None
        return self.claim.connection

    def _check_whole(self) -> None:
        connection, claim = self._connection, self.claim
        if self._escaped():
            raise claim.escape or escaped(claim, "closing or replacing its connection")
        if connection.closed == 0 and connection.aborted:
            failure = connection.failure
            raise TransactionAborted(
                f"The body of consumer {claim.consumer_name!r} caught a database error of message "
                f"{claim.performed_by!r} and went on, so nothing was stored. The first error: "
                f"{str(failure).strip() if failure else 'unknown'}"
            ) from failure

    def _escaped(self) -> bool:
        """Whether key and effect are no longer in this transaction, or may not be."""
        state, connection = self.db._state, self._connection
        if connection.lost and self.claim.escape is None:
            return False  # whatever its state, it is gone
        return (
            self.claim.escape is not None
            or state.conn is not connection
            or state.transactions[:1] != [self]
            or connection.closed not in (0, _LOST)
            or (connection.closed == 0 and connection.get_transaction_status() == TRANSACTION_STATUS_IDLE)
        )

    def _commit(self) -> None:
        connection = self._connection
        connection.claim = None
        self.db._state.transactions.clear()  # and with it what the body left open inside
        self.claim.stage = Stage.COMMITTING
        with translated_errors:
            cursor = connection.cursor()
            cursor.execute("COMMIT")
        if cursor.statusmessage != "COMMIT":  # T2: an aborted transaction answers ROLLBACK
            raise TransactionAborted(f"PostgreSQL rolled message {self.claim.performed_by!r} back.")
        self.claim.stage = Stage.COMMITTED

    def _observe(self, error: BaseException | None) -> None:
        connection, claim = self._connection, self.claim
        if claim.stage is Stage.OPEN and claim.escape is None and self._escaped():
            claim.escape = escaped(claim, "closing or replacing its connection")
        claim.lost = connection.lost or connection.closed == _LOST
        if connection.closed == 0 and connection.aborted:
            claim.aborted_by = connection.failure or error
        claim.last_statement_ms = 1_000 * (connection.statement_ended_s - connection.statement_began_s)
        claim.silence_ms = 1_000 * connection.silence_s
        claim.age_ms = 1_000 * (connection.statement_ended_s - claim.began_at_s)

    def _abandon(self) -> None:
        connection = self._connection
        if self.db._state.conn is not connection:  # replaced: its locks must not outlive this
            connection.claim = None
            connection.close()
        self.db.abandon()
