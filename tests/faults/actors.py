"""The actors that the tests disturb, on a broker of their own: `dramatiq tests.faults.actors:broker`.

Every delivery passes points: Dramatiq's hooks, and two in the body. At each it leaves a note, stays
while the test holds it there, and kills its process if the test says so.
"""

from __future__ import annotations

import os
import threading
from signal import SIGKILL
from typing import TYPE_CHECKING, Any

import dramatiq
from dramatiq.middleware import (
    Middleware,
    TimeLimit,
    TimeLimitExceeded,
    default_middleware,
    raise_thread_exception,
)

import settings
from middleware import DurableRedisBroker, IdempotentConsumer
from models import Order, ProcessedMessage, Stock

from .signals import signals

if TYPE_CHECKING:
    from dramatiq import Broker, Worker
    from dramatiq.broker import MessageProxy

NAMESPACE = "faults"
SKU = "SKU-1"


class Failure(Exception):  # noqa: N818 - an outcome that the test wants
    """The test told the body to fail."""


def pass_point(point: str, label: str, note: str = "") -> None:
    """A delivery of the message `label` has come to `point`."""
    signals.note(f"{point}-{label}", f"{os.getpid()} {threading.get_ident()} {note}")
    try:
        signals.hold(f"hold-{point}-{label}")
    except BaseException:
        signals.clear(f"hold-{point}-{label}")  # a hold that was interrupted is over
        raise
    if signals.take(f"kill-{point}-{label}"):
        os.kill(os.getpid(), SIGKILL)


class Points(Middleware):
    """The points of a delivery that are hooks of Dramatiq's."""

    def after_worker_boot(self, broker: Broker, worker: Worker) -> None:
        signals.hold("hold-boot")

    def before_process_message(self, broker: Broker, message: MessageProxy) -> None:
        pass_point("begin", message.args[0], str(message.options.get("retries", 0)))

    def after_process_message(
        self, broker: Broker, message: MessageProxy, *, result: Any = None, exception: Any = None
    ) -> None:
        pass_point("processed", message.args[0])

    def before_ack(self, broker: Broker, message: MessageProxy) -> None:
        pass_point("ack", message.args[0])


#: Looks at the deadlines more often than once a second.
time_limit = TimeLimit(interval=50)
broker = DurableRedisBroker(
    url=settings.REDIS_URL,
    namespace=NAMESPACE,
    heartbeat_timeout=settings.HEARTBEAT_TIMEOUT_MS,
    middleware=[time_limit if kind is TimeLimit else kind() for kind in default_middleware],
)
broker.add_middleware(IdempotentConsumer(ProcessedMessage))
broker.add_middleware(Points())


def _sell(label: str) -> None:
    """Write an order for `label` and take one piece out of stock: two changes, both or none."""
    Order.insert(sku=SKU, quantity=1, customer=label).execute()
    pass_point("body", label)
    Stock.update(quantity=Stock.quantity - 1).where(Stock.sku == SKU).execute()
    pass_point("end", label)
    if signals.take(f"fail-{label}"):
        raise Failure(label)


def _seller(name: str, **options: Any) -> dramatiq.Actor[[str], None]:
    declare = dramatiq.actor(actor_name=name, broker=broker, min_backoff=10, max_backoff=100, **options)
    return declare(_sell)


sell = _seller("sell")
sell_last = _seller("sell_last", priority=100)
sell_elsewhere = _seller("sell_elsewhere", queue_name="elsewhere")
sell_unless_stopped = _seller("sell_unless_stopped", notify_shutdown=True)


@dramatiq.actor(broker=broker, min_backoff=10, max_backoff=100)
def sell_at_the_limit(label: str) -> None:
    """Ends when its time limit has fired and the exception is still on its way (T20)."""
    _sell(label)
    if signals.take(f"late-{label}"):
        thread = threading.get_ident()
        manager: Any = time_limit.manager
        with manager.mu:
            manager.deadlines[thread] = None
        threading.Timer(0.1, raise_thread_exception, (thread, TimeLimitExceeded)).start()
