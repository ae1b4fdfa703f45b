"""How a delivery that did not return ends: one table from SQLSTATE to end.

`docs/design/endings.md` says the same in words; a test holds the two against each other.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import peewee
import psycopg2
from dramatiq.middleware import Shutdown

from .errors import LimitExceeded
from .inbox import Claim, Stage

LOCK_NOT_AVAILABLE = "55P03"
#: Our clock and the server's do not start together.
_NEARLY = 0.95


class End(Enum):
    """What becomes of a delivery that was stopped."""

    FAIL = "as an exception"
    GIVE_BACK = "given back"
    PAUSE = "given back after a pause"
    RUN_AGAIN = "run again at once"
    WAIT = "waits until there is one"


#: What an error means while the body runs or at COMMIT. A SQLSTATE is looked up whole, then by its
#: first three characters, then by its class (two); what is not listed is the body's own failure.
#: 55P03 means a lock that was waited for; NOWAIT's, which comes at once, is told by its time.
SQLSTATES: dict[str, End] = {
    "40001": End.RUN_AGAIN,  # serialization_failure
    "40P01": End.RUN_AGAIN,  # deadlock_detected
    "55P03": End.GIVE_BACK,  # lock_not_available (T11)
    "53": End.PAUSE,  # insufficient_resources: disk full, out of memory
    "58": End.PAUSE,  # system_error: input/output error
    "57P": End.GIVE_BACK,  # the server is going away
    "08": End.GIVE_BACK,  # connection_exception
    "25006": End.PAUSE,  # read_only_sql_transaction: a fail-over is under way
}

#: What these mean when they come while the transaction begins; anything else makes it wait, since
#: nothing has run yet and the reason (no server, no table, no right, no room) is not the message's.
SQLSTATES_AT_BEGIN: dict[str, End] = {
    "40001": End.RUN_AGAIN,
    "40P01": End.RUN_AGAIN,
    "55P03": End.GIVE_BACK,
    "22": End.FAIL,  # data_exception: the message's fault
    "23": End.FAIL,  # integrity_constraint_violation
    "54": End.FAIL,  # program_limit_exceeded
}


#: What these mean in a body that has no transaction of ours: running it again at once is not for us.
SQLSTATES_OUTSIDE: dict[str, End] = {
    state: end for state, end in SQLSTATES.items() if end is not End.RUN_AGAIN
}


def sqlstate_of(error: BaseException | None) -> str | None:
    """The SQLSTATE of an error of psycopg2, or of one that peewee wrapped (T26), if it has one."""
    if isinstance(error, peewee.PeeweeException):
        error = getattr(error, "orig", None) or (error.args[0] if error.args else None)
    if isinstance(error, psycopg2.Error):
        state: Any = error.pgcode
        return state if isinstance(state, str) else None
    return None


def is_of_the_server(error: BaseException) -> bool:
    """Whether waiting may help: not where PostgreSQL refuses the very data (T13)."""
    if not isinstance(error, peewee.PeeweeException | psycopg2.Error):
        return False
    return (sqlstate_of(error) or "")[:2] not in ("22", "23", "54")


def look_up(table: dict[str, End], sqlstate: str | None, otherwise: End) -> End:
    """The end that the table names for a SQLSTATE or, failing that, for its longest prefix."""
    for size in (5, 3, 2):
        if sqlstate and sqlstate[:size] in table:
            return table[sqlstate[:size]]
    return otherwise


def judge(error: BaseException, claim: Claim, lock_timeout_ms: int) -> tuple[End, BaseException]:
    """How a delivery ends that was stopped by an error, and the error to tell of it.

    Arguments:
      error: what came out of the guarded transaction.
      claim: how far that transaction came, and how its connection stood when it was left.
      lock_timeout_ms: a 55P03 that took less was no wait for a lock.
    """
    if not isinstance(error, Exception):
        # Before the state of the connection: under gevent an interrupt closes it (T7).
        stopping = isinstance(error, Shutdown) or claim.stage is Stage.COMMITTING
        return (End.GIVE_BACK if stopping else End.FAIL), error
    if claim.escape is not None:
        return End.FAIL, claim.escape
    if claim.stage is Stage.NOT_BEGUN:
        if not is_of_the_server(error):
            return End.FAIL, error
        return look_up(SQLSTATES_AT_BEGIN, sqlstate_of(error), End.WAIT), error
    if claim.lost:
        limit = _exceeded_limit(claim)
        return (End.FAIL, limit) if limit else (End.GIVE_BACK, error)
    cause = error if claim.stage is Stage.COMMITTING else claim.aborted_by
    sqlstate = sqlstate_of(cause)  # None: the database had no part in it
    if sqlstate == LOCK_NOT_AVAILABLE and claim.last_statement_ms < _NEARLY * lock_timeout_ms:
        return End.FAIL, error  # NOWAIT, or a shorter limit of the body's own
    return look_up(SQLSTATES, sqlstate, End.FAIL), error


def judge_outside(error: BaseException, *, lost: bool) -> End:
    """How a delivery ends whose body had no transaction of ours and was stopped by an error.

    Arguments:
      lost: it is the loss of a connection of ours, so that the trouble is our server's.
    """
    if isinstance(error, Shutdown):
        return End.GIVE_BACK
    if not isinstance(error, Exception) or not is_of_the_server(error):
        return End.FAIL
    return End.GIVE_BACK if lost else look_up(SQLSTATES_OUTSIDE, sqlstate_of(error), End.FAIL)


def _exceeded_limit(claim: Claim) -> LimitExceeded | None:
    """A server that hangs up does not say why; the clock does (25P03 and 25P04 get lost)."""
    what = f"The body of consumer {claim.consumer_name!r} on message {claim.performed_by!r}"
    limits = claim.limits
    if limits.idle_ms and claim.silence_ms >= _NEARLY * limits.idle_ms:
        return LimitExceeded(
            f"{what} sent no statement for {claim.silence_ms:.0f} ms, and PostgreSQL ended its "
            f"transaction after {limits.idle_ms} ms: raise the actor's option idle_limit_ms, or "
            f"compute before the first statement."
        )
    if limits.transaction_ms and claim.age_ms >= _NEARLY * limits.transaction_ms:
        return LimitExceeded(
            f"{what} took {claim.age_ms:.0f} ms, and PostgreSQL ended its transaction after "
            f"{limits.transaction_ms} ms: raise the actor's option time_limit."
        )
    return None
