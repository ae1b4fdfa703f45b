"""The application's database: a peewee database that can begin a transaction with a claim.

`atomic(claim=...)` is the guard around an actor: its begin sends BEGIN and the INSERT of the key
in one round trip, and only its end may end the transaction.
"""

from __future__ import annotations

import os
import socket
import weakref
from contextlib import suppress
from threading import Lock, get_ident
from time import monotonic
from typing import Any

import peewee
import psycopg2
from psycopg2.extensions import TRANSACTION_STATUS_IDLE

from . import wait_callback
from .connection import GuardedConnection, GuardedCursor
from .errors import ConfigurationError
from .inbox import Claim, KeyTaken, Limits, Stage
from .transaction import GuardedTransaction, translated_errors

#: How often PostgreSQL looks whether the client of a long statement is still there.
CHECK_CLIENT_MS = 2_000


class Database(peewee.PostgresqlDatabase):
    """An unpooled PostgreSQL database: one connection per thread or greenlet.

    The first statement outside a transaction finds out whether the server hung up meanwhile, and
    connects again. A connection that was opened before a fork stays with the parent (T18).

    Arguments:
      url: a postgresql:// URL; None to import without one, then the first connection raises unless
        `init` has given it one.
      lock_timeout_ms: how long a statement waits for a lock, 0: for ever.
      idle_limit_ms: how long a transaction may be silent between two statements, 0: for ever.
      transaction_timeout_ms: how old a transaction may grow where the server knows this limit
        (PostgreSQL 17), 0: without end.
      connect_timeout_s, keepalives_idle_s, keepalives_interval_s, keepalives_count: libpq's.
      pgbouncer: True behind pgbouncer in transaction mode: nothing is set or prepared for a
        session, each transaction carries its limits (T6).
      url_variable: the setting that the error about a missing URL names.

    Raises, at the first connection:
      ConfigurationError: no URL was given.
    """

    #: peewee's own: connection, open transactions and callbacks of this thread; and its lock.
    _state: Any
    _lock: Any

    def __init__(
        self,
        url: str | None,
        *,
        lock_timeout_ms: int = 2_000,
        idle_limit_ms: int = 60_000,
        transaction_timeout_ms: int = 630_000,
        connect_timeout_s: int = 5,
        keepalives_idle_s: int = 10,
        keepalives_interval_s: int = 5,
        keepalives_count: int = 3,
        pgbouncer: bool = False,
        url_variable: str = "DATABASE_URL",
        **options: Any,
    ) -> None:
        self.url_variable = url_variable
        self.lock_timeout_ms = lock_timeout_ms
        self.limits = Limits(idle_limit_ms, transaction_timeout_ms)
        self.pgbouncer = pgbouncer
        super().__init__(
            url,
            connection_factory=GuardedConnection,
            cursor_factory=GuardedCursor,
            connect_timeout=connect_timeout_s,
            keepalives_idle=keepalives_idle_s,
            keepalives_interval=keepalives_interval_s,
            keepalives_count=keepalives_count,
            # Data that was sent and is not acknowledged is no idle connection: same patience.
            tcp_user_timeout=1_000 * (keepalives_idle_s + keepalives_interval_s * keepalives_count),
            **options,
        )
        self._open: weakref.WeakSet[GuardedConnection] = weakref.WeakSet()
        wait_callback.install()
        _databases.add(self)

    def init(self, database: str | None, **options: Any) -> None:  # type: ignore[override] # peewee has no types
        """Give the database its URL, as peewee's `init` does."""
        self.url = database
        super().init(_for_libpq(database) if database else "unset", **options)

    @staticmethod
    def of(model: type[peewee.Model]) -> Database:
        """The database of a model.

        Raises:
          ConfigurationError: it is none of ours, so it cannot guard a transaction.
        """
        database = model._meta.database
        if not isinstance(database, Database):
            raise ConfigurationError(
                f"The database of {model.__name__} is {type(database).__name__}; make it a Database of "
                f"this package, which is peewee's PostgresqlDatabase with a guarded transaction."
            )
        return database

    def check_url(self) -> None:
        """A database that knows where to connect passes.

        Raises:
          ConfigurationError: names the setting that is missing.
        """
        if not self.url:
            raise ConfigurationError(
                f"{self.url_variable} is not set: set it to the address of a PostgreSQL database, "
                f"such as postgresql://user:password@localhost:5432/shop."
            )

    def _connect(self) -> GuardedConnection:
        self.check_url()
        connection: GuardedConnection = super()._connect()  # type: ignore[misc] # peewee has it
        connection.statement_ended_s = monotonic()
        connection.thread_id = get_ident()
        self._open.add(connection)
        return connection

    def _initialize_connection(self, conn: GuardedConnection) -> None:
        if self.pgbouncer:
            return
        cursor = conn.cursor()
        cursor.execute(self._set_limits("SET", self.limits, lock=True))
        # T6: else a statement goes on, and keeps the key, long after its worker was killed. Servers
        # that are older, or cannot look at a socket while they work, refuse it.
        with suppress(psycopg2.Error):
            cursor.execute(f"SET client_connection_check_interval = {CHECK_CLIENT_MS}")

    def _set_limits(self, command: str, limits: Limits, *, lock: bool) -> str:
        """The statements that set limits, for a session (SET) or a transaction (SET LOCAL)."""
        texts = [f"{command} idle_in_transaction_session_timeout = {limits.idle_ms:d}"]
        if lock:
            texts.append(f"{command} lock_timeout = {self.lock_timeout_ms:d}")
        if (self.server_version or 0) >= 170_000:
            # A running timer is not set again, only stopped and started.
            if command != "SET" and limits.transaction_ms:
                texts.append(f"{command} transaction_timeout = 0")
            texts.append(f"{command} transaction_timeout = {limits.transaction_ms:d}")
        return "; ".join(texts)

    def transaction(self, *args: Any, **kwargs: Any) -> Any:
        """A transaction of peewee's, or with ``claim=`` the guarded one of a delivery."""
        if "claim" in kwargs:
            return GuardedTransaction(self, kwargs["claim"])
        return super().transaction(*args, **kwargs)

    def begin(self, isolation_level: Any = None, *, claim: Claim | None = None) -> None:
        """Begin a transaction, with a claim by inserting its key first.

        Raises:
          KeyTaken: the key is committed already; no transaction is open then.
        """
        if claim is not None:
            self._begin_with_claim(claim)
        elif self.pgbouncer:
            super().begin(isolation_level)
            self.execute_sql(self._set_limits("SET LOCAL", self.limits, lock=True))
        else:
            super().begin(isolation_level)

    def _begin_with_claim(self, claim: Claim) -> None:
        inbox = claim.inbox
        while True:
            connection: GuardedConnection = self.connection()
            connection.failure = None
            try:
                with translated_errors:
                    cursor = connection.cursor()
                    cursor.execute(*self._claiming(connection, claim))
                if cursor.rowcount == 1:
                    break
                processed = inbox.look_up(claim.consumer_name, claim.key)
            except BaseException:
                self.abandon()
                raise
            self.abandon()
            if processed is not None:
                raise KeyTaken(processed)
            # The row was purged between the two statements: the key is free again.
        claim.connection = connection
        claim.began_at_s = connection.statement_began_s
        claim.stage = Stage.OPEN
        connection.claim = claim

    def _claiming(self, connection: GuardedConnection, claim: Claim) -> tuple[str, Any]:
        """BEGIN and the insert of the key as one text, hence in one round trip."""
        statement, values = claim.inbox.inserting(claim)
        if self.pgbouncer:
            limits = self._set_limits("SET LOCAL", claim.limits, lock=True)
            return f"BEGIN; {limits}; {statement.text}", values
        if statement.name not in connection.prepared:
            connection.cursor().execute(statement.prepare)
            connection.prepared |= {statement.name}
        if claim.limits is self.limits:
            return f"BEGIN; {statement.execute}", values
        limits = self._set_limits("SET LOCAL", claim.limits, lock=False)
        return f"BEGIN; {limits}; {statement.execute}", values

    def cursor(self, named_cursor: Any = None) -> Any:
        state = self._state
        if not state.closed and not state.transactions:
            self._hang_up_if_the_server_did(state.conn)
        return super().cursor(named_cursor)  # type: ignore[no-untyped-call] # peewee has no types

    def _hang_up_if_the_server_did(self, connection: GuardedConnection) -> None:
        # Asks the socket, not the server. Repeating a statement that failed instead could run it
        # twice: its connection may have been lost after it took effect (T5).
        try:
            if not connection.closed:
                connection.poll()  # reads the server's last words
                connection.poll()  # meets the end of the stream behind them
        except psycopg2.Error:
            pass
        if connection.closed:
            self.discard()

    def close(self) -> bool:
        """Close this thread's connection; in the transaction of a delivery that is refused.

        Raises:
          TransactionEscaped: an actor tried it (T3).
        """
        connection = self._state.conn
        if connection is not None and connection.claim is not None:
            connection.refuse("database.close()")
        return bool(super().close())

    def has_begun(self) -> bool:
        """Whether this thread's connection is in a transaction, whoever began it."""
        connection = self._state.conn
        return self.in_transaction() or (
            connection is not None and connection.get_transaction_status() != TRANSACTION_STATUS_IDLE
        )

    def is_lost(self, error: BaseException) -> bool:
        """Whether an error is the loss of a connection of ours, or none could be made.

        A block of peewee's that is left by the error rolls back, and has connected anew for it.
        """
        orig = getattr(error, "orig", error)
        raised_by = getattr(getattr(orig, "cursor", None), "connection", None)
        connection = raised_by if raised_by in self._open else self._state.conn
        return connection is None or connection.lost or connection.closed != 0

    def will_call(self, fn: Any) -> bool:
        """Whether `after_commit` has this function already."""
        return fn in self._state.commit_callbacks

    def settle_down(self) -> None:
        """Make sure that this thread's connection is idle and outside any transaction, or gone.

        What an interrupt left behind would else be committed with the next message (T4).
        """
        state = self._state
        idle = state.closed or (
            state.conn.closed == 0
            and state.conn.claim is None
            and not state.conn.changed
            and state.conn.autocommit
            and state.conn.get_transaction_status() == TRANSACTION_STATUS_IDLE
        )
        if not idle or state.transactions or state.commit_callbacks:
            self.discard()

    def abandon(self) -> None:
        """Roll back whatever this thread has begun; a connection that cannot is thrown away."""
        state = self._state
        state.transactions.clear()
        state.commit_callbacks.clear()
        if state.closed:
            return
        connection: GuardedConnection = state.conn
        connection.claim = None
        if connection.lost:
            self.discard()
            return
        try:
            if connection.closed == 0 and connection.get_transaction_status() != TRANSACTION_STATUS_IDLE:
                connection.cursor().execute("ROLLBACK")
        except psycopg2.Error:
            self.discard()
        else:
            self.settle_down()

    def cut_off(self, threads: set[int], silent_s: float) -> None:
        """Break the connections of threads that have had no answer for so long, and are in no body.

        A server that is frozen keeps a thread in libpq, where it hears of nothing (T6).
        """
        for connection in list(self._open):
            waits = connection.statement_began_s > connection.statement_ended_s
            silent = monotonic() - connection.statement_began_s > silent_s
            if connection.thread_id in threads and connection.claim is None and waits and silent:
                with suppress(OSError, psycopg2.Error):
                    end = socket.socket(fileno=os.dup(connection.fileno()))
                    end.shutdown(socket.SHUT_RDWR)
                    end.close()

    def discard(self) -> None:
        """Close this thread's connection whatever its state; the next statement connects again."""
        state = self._state
        connection: GuardedConnection | None = state.conn
        state.reset()
        if connection is not None:
            connection.claim = None
            connection.close()


def _for_libpq(url: str) -> str:
    """Peewee takes for a URL only what begins with postgresql://; hosting services write more."""
    for prefix in ("postgres://", "postgresql+psycopg2://"):
        if url.startswith(prefix):
            return "postgresql://" + url[len(prefix) :]
    return url


_databases: weakref.WeakSet[Database] = weakref.WeakSet()


def _forget_connections_of_the_parent() -> None:
    # T18. psycopg2 closes nothing in a process that did not open it.
    for database in _databases:
        database._state.reset()
        database._lock = Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_connections_of_the_parent)
