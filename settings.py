"""The settings of this application, and the only reader of its environment.

Each is a variable of the process or, where that has none, of the file `.env` beside this one;
`.env.example` shows them all. `ONETAKE_ENV_FILE` names another file, and an empty value none.
Reading connects to nothing. A value that cannot work raises environs' `EnvError` with a sentence
that names the variable, its value and a right one.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

from environs import Env, EnvError

#: What Dramatiq gives an actor that says nothing: ten minutes.
_DEFAULT_TIME_LIMIT_MS = 600_000
_DAY_MS = 86_400_000

_env = Env()
_file = os.environ.get("ONETAKE_ENV_FILE", str(Path(__file__).with_name(".env")))
try:
    _is_read = bool(_file) and bool(_env.read_env(_file, recurse=False))
except (OSError, ValueError) as _error:
    raise EnvError(f"{_file!r} cannot be read ({_error}): make it a text file in UTF-8.") from _error
if _file and not _is_read and "ONETAKE_ENV_FILE" in os.environ:
    raise EnvError(
        f"ONETAKE_ENV_FILE is {_file!r}, and there is no such file. "
        f"Name one that exists, or set it to nothing to read none."
    )


def _number(name: str, default: int, lowest: int, highest: int) -> int:
    text = _env.str(name, str(default)).strip()
    if not re.fullmatch(r"[0-9]{1,18}", text) or not lowest <= int(text) <= highest:
        raise EnvError(
            f"{name} is {text!r}; it must be a whole number "
            f"from {lowest} to {highest}, for example {default}."
        )
    return int(text)


def _flag(name: str, *, default: bool) -> bool:
    try:
        return _env.bool(name, default)
    except EnvError:
        raise EnvError(
            f"{name} is {_env.str(name)!r}; it must be true or false, for example {default}."
        ) from None


def _name(name: str, default: str) -> str:
    text = _env.str(name, default)
    if not re.fullmatch(r"[\w.:-]{1,100}", text, re.ASCII):
        raise EnvError(
            f"{name} is {text!r}; it must be 1 to 100 letters, digits, '.', '_', ':' or '-', "
            f"for example {default!r}."
        )
    return text


def _url(name: str, schemes: tuple[str, ...], example: str) -> str | None:
    """None where the variable is absent or empty: importing works, the first connection raises."""
    text = _env.str(name, "").strip()
    if text and not text.startswith(tuple(f"{scheme}://" for scheme in schemes)):
        shown = text.partition(":")[0][:20]  # what follows may hold a password
        raise EnvError(
            f"{name} is '{shown}...'; it must be a URL that starts with "
            f"{' or '.join(f'{scheme}://' for scheme in schemes)}, for example {example}"
        )
    try:
        _check_parts(urlsplit(text))
    except ValueError:
        raise EnvError(
            f"{name} is no URL that can be read: the host, the port (a number) or, for Redis, the database "
            f"(a number) is wrong, or a character must be written as %XX; a right one is {example}"
        ) from None
    return text or None


def _check_parts(url: SplitResult) -> None:
    _ = url.port  # raises where it is no number
    if url.scheme in ("redis", "rediss") and not re.fullmatch(r"(/[0-9]*)?", url.path):
        raise ValueError


DATABASE_URL = _url(
    "DATABASE_URL",
    ("postgresql", "postgres"),
    "postgresql://onetake:password@localhost:5432/onetake",
)
REDIS_URL = _url("REDIS_URL", ("redis", "rediss", "unix"), "redis://localhost:6379/0")

#: What the names of all queues in Redis begin with.
REDIS_NAMESPACE = _name("REDIS_NAMESPACE", "dramatiq")

#: A worker that has been silent for longer is taken for dead: its messages are handed out again.
HEARTBEAT_TIMEOUT_MS = _number("HEARTBEAT_TIMEOUT_MS", 5_000, 500, _DAY_MS)

#: So many messages of a queue are in Redis at most; the others wait in PostgreSQL.
REDIS_WINDOW = _number("REDIS_WINDOW", 10_000, 1, 10_000_000)

#: Larger messages are refused where they are sent: what is large belongs into a table.
MAX_MESSAGE_BYTES = _number("MAX_MESSAGE_BYTES", 1 << 20, 1_000, 100 << 20)

#: How long a statement waits for a lock, another delivery's key included (T11). There is no "for
#: ever": a waiting thread hears of neither its time limit nor a shutdown (T6).
LOCK_TIMEOUT_MS = _number("LOCK_TIMEOUT_MS", 2_000, 1, _DAY_MS)

#: How long a transaction may be silent between two statements: PostgreSQL then frees the key that
#: a paused or vanished worker holds (T6).
IDLE_LIMIT_MS = _number("IDLE_LIMIT_MS", 60_000, 1, _DAY_MS)

#: How old a transaction may grow, where the server knows this limit (PostgreSQL 17). It is longer
#: than the time limit of an actor, so that this one is heard of first.
TRANSACTION_TIMEOUT_MS = _number(
    "TRANSACTION_TIMEOUT_MS",
    _DEFAULT_TIME_LIMIT_MS + 30_000,
    _DEFAULT_TIME_LIMIT_MS + 1_000,
    _DAY_MS,
)

#: For how long a connection to PostgreSQL may be in the making.
CONNECT_TIMEOUT_S = _number("CONNECT_TIMEOUT_S", 5, 1, 3_600)

#: A connection whose other end is gone is noticed after idle + count x interval seconds.
KEEPALIVES_IDLE_S = _number("KEEPALIVES_IDLE_S", 10, 1, 7_200)
KEEPALIVES_INTERVAL_S = _number("KEEPALIVES_INTERVAL_S", 5, 1, 7_200)
KEEPALIVES_COUNT = _number("KEEPALIVES_COUNT", 3, 1, 100)

#: True where DATABASE_URL leads to pgbouncer in transaction mode (T6).
PGBOUNCER = _flag("PGBOUNCER", default=False)

#: The port of the web application.
PORT = _number("PORT", 8_000, 1, 65_535)

#: The payment service: the port that it listens on, and where the shop looks for it.
PAYMENTS_PORT = _number("PAYMENTS_PORT", 8_001, 1, 65_535)
PAYMENTS_URL = (
    _url("PAYMENTS_URL", ("http", "https"), "http://127.0.0.1:8001") or f"http://127.0.0.1:{PAYMENTS_PORT}"
)

#: How long the shop waits for an answer of it; then the same charge is asked for again.
PAYMENTS_TIMEOUT_MS = _number("PAYMENTS_TIMEOUT_MS", 5_000, 1, 3_600_000)

#: Where the payment service keeps what was charged, as seen from beside this file.
PAYMENTS_FILE = _env.str("PAYMENTS_FILE", ".payments/payments.sqlite")

if not LOCK_TIMEOUT_MS < IDLE_LIMIT_MS:
    raise EnvError(
        f"LOCK_TIMEOUT_MS is {LOCK_TIMEOUT_MS} and must be less than IDLE_LIMIT_MS, which is "
        f"{IDLE_LIMIT_MS}; for example LOCK_TIMEOUT_MS=2000 and IDLE_LIMIT_MS=60000."
    )
if not IDLE_LIMIT_MS < TRANSACTION_TIMEOUT_MS:
    raise EnvError(
        f"IDLE_LIMIT_MS is {IDLE_LIMIT_MS} and must be less than TRANSACTION_TIMEOUT_MS, which is "
        f"{TRANSACTION_TIMEOUT_MS}; for example IDLE_LIMIT_MS=60000 and "
        f"TRANSACTION_TIMEOUT_MS=630000."
    )
