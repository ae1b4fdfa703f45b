"""How the service misbehaves: the address of a customer says it, as in ada+timeout@example.org."""

from __future__ import annotations

from time import sleep

from werkzeug.exceptions import InternalServerError

import settings

SLOW_S = 1.0


def asked_of(customer: str) -> set[str]:
    """What stands between + and @: any of refuse, slow, fail and timeout."""
    return set(customer.rpartition("@")[0].split("+")[1:])


def before(asked: set[str], attempt: int) -> None:
    """Be slow, or fail at the first attempt, before anything is charged."""
    if "slow" in asked:
        sleep(SLOW_S)
    if "fail" in asked and attempt == 1:
        raise InternalServerError("This is a failure on purpose; nothing was charged.")


def after(asked: set[str], attempt: int) -> None:
    """Having charged, let the first attempt wait for longer than its client does."""
    if "timeout" in asked and attempt == 1:
        sleep(2 * settings.PAYMENTS_TIMEOUT_MS / 1_000)
