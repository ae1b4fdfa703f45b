"""Interrupts reach the body of an actor and nothing else.

Dramatiq raises TimeLimitExceeded and Shutdown in a worker thread from outside. One that lands in
COMMIT, or in the hook that stores a retry, does damage (T4, T20). So the limit is set anew when
the body begins (waiting for an absent database or a held key uses up nothing) and is taken off
when it has ended.
"""

from __future__ import annotations

import sys
import threading
from math import inf
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

from dramatiq.middleware import ShutdownNotifications, TimeLimit, TimeLimitExceeded

from .stack import find

if TYPE_CHECKING:
    from dramatiq import Actor, Broker
    from dramatiq.broker import MessageProxy

#: How long an interrupt that was announced may take to arrive, in seconds.
_ARRIVAL_S = 1.0


def limit_ms(broker: Broker, message: MessageProxy, actor: Actor[Any, Any]) -> float:
    """The time limit of a message in milliseconds; infinity without a TimeLimit in the stack."""
    time_limit = find(broker, TimeLimit)
    if time_limit is None:
        return inf
    default = actor.options.get("time_limit", time_limit.time_limit)
    return float(message.options.get("time_limit") or default)


def release(broker: Broker, message: MessageProxy, actor: Actor[Any, Any]) -> None:
    """The body begins: it has its whole time limit, and hears of a shutdown if it wants to."""
    time_limit = find(broker, TimeLimit)
    if time_limit is not None:
        manager: Any = time_limit.manager
        manager.add_timeout(threading.get_ident(), limit_ms(broker, message, actor))
    shutdown = find(broker, ShutdownNotifications)
    if shutdown is not None and shutdown.should_notify(actor, message):
        shutdown.manager.add_notification()


def _has_arrived(error: BaseException | None) -> bool:
    """Whether the interrupt is what is being handled, or led to it."""
    while error is not None:
        if isinstance(error, TimeLimitExceeded):
            return True
        error = error.__context__
    return False


def hold(broker: Broker) -> None:
    """Let nothing interrupt this thread: it waits for a key, or ends its transaction.

    Raises:
      TimeLimitExceeded: it had fired already and has now arrived (T20).
    """
    shutdown = find(broker, ShutdownNotifications)
    if shutdown is not None:
        shutdown.manager.remove_notification()
    time_limit = find(broker, TimeLimit)
    if time_limit is None:
        return
    manager: Any = time_limit.manager
    me = threading.get_ident()
    if not hasattr(manager, "mu"):  # gevent's timers fire at once or not at all
        manager.remove_timeout(me)
        return
    with manager.mu:
        fired = manager.deadlines.pop(me, inf) is None
    if fired and not _has_arrived(sys.exception()):
        # The manager clears a deadline under its lock and raises after it: wait for it here.
        until_s = monotonic() + _ARRIVAL_S
        while monotonic() < until_s:
            sleep(0.001)
