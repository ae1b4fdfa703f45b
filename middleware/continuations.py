"""What a message sets off is set off by its first run, and not again by a redelivery (I5).

Dramatiq's Callbacks, Pipelines and GroupCallbacks act after the commit and know nothing of keys.
Here they are made to overlook redeliveries.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from dramatiq.middleware import Callbacks, GroupCallbacks, Middleware, Pipelines

from .delivery import current

if TYPE_CHECKING:
    from dramatiq import Broker
    from dramatiq.broker import MessageProxy


def spare_redeliveries(broker: Broker) -> None:
    """Let the broker's continuations overlook redeliveries, wherever they stand in the stack."""
    for middleware in broker.middleware:
        if isinstance(middleware, Callbacks | Pipelines | GroupCallbacks):
            _spare(middleware)


def _spare(middleware: Middleware) -> None:
    hook = middleware.after_process_message
    if getattr(hook, "spares_redeliveries", False):
        return

    @functools.wraps(hook)
    def after_process_message(broker: Broker, message: MessageProxy, **outcome: Any) -> None:
        if not current.redelivered:
            hook(broker, message, **outcome)

    after_process_message.spares_redeliveries = True  # type: ignore[attr-defined] # our own mark
    middleware.after_process_message = after_process_message  # type: ignore[method-assign] # one instance
