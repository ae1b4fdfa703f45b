"""A psycopg2 connection that keeps the transaction of a key whole.

While a claim is open on it, nobody but `GuardedTransaction` may end the transaction (T3). It also
remembers what `ends.judge` wants to know: the error that aborted the transaction, and when the
server last heard from us.
"""

from __future__ import annotations

import re
from functools import lru_cache
from time import monotonic
from typing import TYPE_CHECKING, Any, NoReturn

import psycopg2
from psycopg2 import extensions

from .errors import TransactionEscaped

if TYPE_CHECKING:
    from collections.abc import Callable

    from .inbox import Claim

_ENDING = (
    r"(?:commit|end|abort|begin|start\s+transaction|prepare\s+transaction"
    r"|rollback(?!\s+(?:work\s+|transaction\s+)?to\b))\b"
)
_COMMENT = r"(?:\s|--[^\n\r]*[\n\r]|/\*.*?\*/)*"
#: A statement that can only end the transaction.
_ends_transaction = re.compile(_COMMENT + _ENDING, re.IGNORECASE | re.DOTALL).match
#: A text that has such a statement somewhere, or only looks like it: a string, a CASE ... END.
_may_end_transaction = re.compile(r"(?:;|\*/|[\n\r])\s*" + _ENDING, re.IGNORECASE).search

#: A statement that changes the session beyond its transaction.
_changes_session = re.compile(
    r"(?:^|;|\*/|[\n\r])\s*(?:set\s+(?!local\b|constraints\b|transaction\b)|reset\b|discard\b)|set_config",
    re.IGNORECASE,
).search

IN_FAILED_TRANSACTION = "25P02"


class GuardedConnection(extensions.connection):
    """A connection that refuses to end the transaction of an open claim."""

    #: The claim whose transaction is open; None: the connection behaves like any other.
    claim: Claim | None = None
    #: Which thread or greenlet opened it.
    thread_id = 0
    #: The names of the statements that were prepared in this session.
    prepared: frozenset[str] = frozenset()
    #: What aborted the transaction, or nearly did.
    failure: psycopg2.Error | None = None
    #: A body changed the session, its search_path perhaps: not even the key would be where it was.
    changed = False
    #: libpq said that the connection is gone; psycopg2 does not always mark it as closed.
    lost = False
    statement_began_s = 0.0
    statement_ended_s = 0.0
    #: How long the server had heard nothing when the last statement was sent, in seconds.
    silence_s = 0.0

    def refuse(self, what: str) -> NoReturn:
        """Refuse to end the transaction, and remember it should the body swallow the error.

        Raises:
          TransactionEscaped: always.
        """
        assert self.claim is not None
        self.claim.escape = escaped(self.claim, what)
        raise self.claim.escape

    def cursor(self, *args: Any, **kwargs: Any) -> Any:
        """A cursor that is guarded, whatever class it is asked for (a RealDictCursor, say)."""
        factory = kwargs.get("cursor_factory")
        if factory is not None and not issubclass(factory, GuardedCursor):
            kwargs["cursor_factory"] = _guarded(factory)
        return super().cursor(*args, **kwargs)

    def commit(self) -> None:
        if self.claim is not None:
            self.refuse("connection.commit()")
        super().commit()

    def rollback(self) -> None:
        if self.claim is not None:
            self.refuse("connection.rollback()")
        super().rollback()

    def close(self) -> None:
        if self.claim is not None:
            self.refuse("connection.close()")
        super().close()

    @property
    def aborted(self) -> bool:
        """Whether PostgreSQL can only roll the open transaction back (T2)."""
        return self.get_transaction_status() == extensions.TRANSACTION_STATUS_INERROR


class GuardedCursor(extensions.cursor):
    """A cursor that looks at each statement before it is sent, and at its error."""

    connection: GuardedConnection

    def execute(self, query: Any, vars: Any = None) -> None:  # noqa: A002 - psycopg2's name
        self._send(super().execute, query, vars)

    def executemany(self, query: Any, vars_list: Any) -> None:
        self._send(super().executemany, query, vars_list)

    def copy_expert(self, sql: Any, file: Any, size: int = 8192) -> None:
        self._send(super().copy_expert, sql, file, size)

    def callproc(self, *arguments: Any) -> Any:
        return self._run(super().callproc, *arguments)

    def copy_from(self, *arguments: Any, **options: Any) -> None:
        self._run(super().copy_from, *arguments, **options)

    def copy_to(self, *arguments: Any, **options: Any) -> None:
        self._run(super().copy_to, *arguments, **options)

    def _send(self, method: Callable[..., Any], query: Any, *arguments: Any) -> None:
        connection = self.connection
        if connection.claim is None:
            self._run(method, query, *arguments)
            return
        text = query if isinstance(query, str) else _text_of(query, self)
        if _changes_session(text):
            connection.changed = True
        if _ends_transaction(text):
            connection.refuse(text.strip().split(";")[0][:60])
        if not _may_end_transaction(text):
            self._run(method, query, *arguments)
            return
        # A COMMIT inside a longer text shows in the number of the transaction (T3).
        before = _transaction_number(connection)
        self._run(method, query, *arguments)
        if not connection.aborted and _transaction_number(connection) != before:
            connection.refuse("a text that contains COMMIT or ROLLBACK")

    def _run(self, method: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        connection = self.connection
        began_s = connection.statement_began_s = monotonic()
        if not connection.closed:
            connection.silence_s = began_s - connection.statement_ended_s
        try:
            return method(*arguments, **options)
        except psycopg2.Error as error:
            # PostgreSQL's errors carry a SQLSTATE, and what psycopg2 finds wrong has other types.
            if error.pgcode is None and type(error) in (
                psycopg2.DatabaseError,
                psycopg2.OperationalError,
            ):
                connection.lost = True
            if error.pgcode != IN_FAILED_TRANSACTION:
                connection.failure = error
            raise
        finally:
            connection.statement_ended_s = monotonic()


@lru_cache(maxsize=32)
def _guarded(factory: type[extensions.cursor]) -> type[extensions.cursor]:
    return type(f"Guarded{factory.__name__}", (GuardedCursor, factory), {})


def escaped(claim: Claim, what: str) -> TransactionEscaped:
    """The error for a body that ended its transaction, or tried to, by `what`."""
    return TransactionEscaped(
        f"The body of consumer {claim.consumer_name!r} ended, or tried to end, the transaction of "
        f"message {claim.performed_by!r} by {what}. Remove that from the actor; a block "
        f"'with database.atomic():' inside it is a savepoint and allowed."
    )


def _transaction_number(connection: GuardedConnection) -> Any:
    cursor = extensions.connection.cursor(connection, cursor_factory=extensions.cursor)
    cursor.execute("SELECT pg_current_xact_id_if_assigned()::text")
    row = cursor.fetchone()
    return row and row[0]


def _text_of(query: Any, cursor: extensions.cursor) -> str:
    if isinstance(query, bytes):
        return query.decode("utf-8", "replace")
    return str(query.as_string(cursor))
