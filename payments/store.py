"""What the payment service remembers: charges, refunds, and the answer to each Idempotency-Key."""

from __future__ import annotations

import sqlite3
from contextlib import closing, contextmanager
from threading import Lock
from typing import TYPE_CHECKING

from werkzeug.exceptions import Conflict, UnprocessableEntity

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

TABLES = """
CREATE TABLE IF NOT EXISTS requests (
    key text PRIMARY KEY, fingerprint text NOT NULL, attempts integer NOT NULL, status integer, answer text
);
CREATE TABLE IF NOT EXISTS charges (
    id integer PRIMARY KEY, customer text NOT NULL, amount_cents integer NOT NULL, reference text NOT NULL
);
CREATE TABLE IF NOT EXISTS refunds (
    id integer PRIMARY KEY, charge_id integer NOT NULL UNIQUE REFERENCES charges
);
"""

Answer = tuple[int, str]


class Store:
    """Charges in an SQLite file, for one process.

    Arguments:
      file: its path; made with its folder if it is not there.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._running: set[str] = set()
        self._lock = Lock()

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """A transaction that nobody else writes beside."""
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with closing(sqlite3.connect(self._file, timeout=10, isolation_level=None)) as connection:
            connection.executescript("PRAGMA journal_mode = WAL; PRAGMA synchronous = NORMAL;")
            connection.execute("BEGIN IMMEDIATE")
            for statement in TABLES.split(";"):
                connection.execute(statement)
            with connection:
                yield connection

    def once(
        self,
        key: str,
        fingerprint: str,
        before: Callable[[int], object],
        act: Callable[[sqlite3.Connection], Answer],
    ) -> tuple[Answer, int]:
        """Act once for a key, and answer the same ever after.

        Arguments:
          key: the Idempotency-Key.
          fingerprint: what is asked for; another one under the same key is refused.
          before: is called with the number of the attempt, from 1; what it raises is not remembered.
          act: does the work in the transaction that remembers its answer.

        Returns:
          The answer, and the number of the attempt.

        Raises:
          Conflict: an attempt with this key is being worked at.
          UnprocessableEntity: the key was used for something else.
        """
        with self._at_work(key):
            with self.transaction() as db:
                db.execute(
                    "INSERT INTO requests (key, fingerprint, attempts) VALUES (?, ?, 1) "
                    "ON CONFLICT (key) DO UPDATE SET attempts = attempts + 1",
                    (key, fingerprint),
                )
                row = db.execute(
                    "SELECT fingerprint, attempts, status, answer FROM requests WHERE key = ?", (key,)
                )
                known, attempt, status, answer = row.fetchone()
            if known != fingerprint:
                raise UnprocessableEntity("This Idempotency-Key was used for another request.")
            if status is not None:
                return (status, answer), attempt
            before(attempt)
            with self.transaction() as db:
                status, answer = act(db)
                db.execute("UPDATE requests SET status = ?, answer = ? WHERE key = ?", (status, answer, key))
            return (status, answer), attempt

    @contextmanager
    def _at_work(self, key: str) -> Iterator[None]:
        with self._lock:
            if key in self._running:
                raise Conflict("A request with this Idempotency-Key is being worked at.")
            self._running.add(key)
        try:
            yield
        finally:
            with self._lock:
                self._running.remove(key)
