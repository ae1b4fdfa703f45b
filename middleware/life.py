"""The life of a worker: it beats, it sweeps up after workers that stopped beating, it leaves.

Beats come from a timer, not with commands: a worker whose threads are all busy has nothing to ask
and would look dead (T14).
"""

from __future__ import annotations

import logging
from queue import Empty
from threading import Event, Thread
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import redis
from dramatiq.middleware import Middleware

from .errors import ConfigurationError
from .periodic import Ticker
from .relay import Relay

if TYPE_CHECKING:
    from collections.abc import Callable

    from dramatiq import Worker

    from .broker import DurableRedisBroker
    from .ledger import Ledger

logger = logging.getLogger("onetake")

#: How long a worker that ends waits for its own threads.
LAST_WORDS_S = 1.0
#: Beats in one heartbeat_timeout.
BEATS = 5


class Life(Middleware):
    """Begins and ends what a worker process needs beside Dramatiq's threads; part of the broker."""

    def __init__(self) -> None:
        self._over = Event()
        self._threads: list[Thread] = []

    def before_worker_boot(self, broker: Any, worker: Worker) -> None:
        _ = broker.guard
        _check_redis(broker)
        if broker.ledger is not None:
            _check_ledger(broker, broker.ledger)
            broker.guard.inbox.attach(broker.ledger.delete)
        broker.broker_id = str(uuid4())  # T18: a worker of its own, also in a forked process

    def after_worker_boot(self, broker: Any, worker: Worker) -> None:
        self._over.clear()
        self._start("onetake-life", self._beat, broker)
        if broker.ledger is not None:
            # Without a relay everything still moves, a second later.
            relay = Relay(broker, broker.ledger, overdue_s=1.0)
            self._start("onetake-relay", relay.run, self._over)
            ticker = Ticker(broker, broker.ledger)
            if ticker.actors:
                self._start("onetake-ticks", ticker.run, self._over)

    def _start(self, name: str, target: Callable[..., None], *arguments: Any) -> None:
        thread = Thread(target=target, args=arguments, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def before_worker_shutdown(self, broker: Any, worker: Worker) -> None:
        # T23: Dramatiq would wait for the running actors first and go on fetching meanwhile.
        for consumer in broker.consumers.values():
            consumer.stop_fetching()
        for delivery in _not_begun(worker):
            broker.consumers[delivery.queue_name].give_back(delivery)
        for consumer in broker.consumers.values():
            consumer.close()

    def after_worker_shutdown(self, broker: Any, worker: Worker) -> None:
        self._over.set()
        while self._threads:
            self._threads.pop().join(timeout=LAST_WORDS_S)  # a frozen server keeps nobody alive
        if not broker.outage.lasts:
            try:
                broker.call("leave", broker.broker_id)
            except redis.RedisError as error:
                broker.outage.begins(error)
        broker.consumers.clear()

    def _beat(self, broker: DurableRedisBroker) -> None:
        steady = ""
        while not self._over.is_set():
            try:
                steady = beat(broker, steady)
            except redis.RedisError as error:
                broker.outage.begins(error)
            self._over.wait(broker.heartbeat_timeout / BEATS / 1_000)


def beat(broker: DurableRedisBroker, steady: str) -> str:
    """Give a sign of life, and hand out again what silent workers had.

    Arguments:
      steady: what the last beat returned, "" at first.

    Returns:
      Since when the beats were in time, by Redis's clock in milliseconds.
    """
    queues = sorted(broker.get_declared_queues())
    timeout, keep = broker.heartbeat_timeout, broker.dead_message_ttl
    raw_steady, count = broker.call("beat", broker.broker_id, timeout, steady, keep, *queues)
    if count:
        logger.info(
            "%d messages of workers that gave no sign of life are handed out again",
            count,
        )
    return str(raw_steady.decode())


def _not_begun(worker: Worker) -> list[Any]:
    """Take what waits in memory for a thread out of a worker's queue."""
    deliveries = []
    while True:
        try:
            deliveries.append(worker.work_queue.get_nowait().message)
        except Empty:
            return deliveries
        worker.work_queue.task_done()


def _check_ledger(broker: DurableRedisBroker, ledger: Ledger) -> None:
    if ledger.database is not broker.guard.database:
        raise ConfigurationError(
            f"{ledger.outbox.__name__} and {broker.guard.inbox.model.__name__} have different Database "
            f"objects, so they share no transaction: give both the same one."
        )


def _check_redis(broker: DurableRedisBroker) -> None:
    broker.check_url()
    try:
        cluster: Any = broker.client.info("cluster")
    except redis.RedisError:
        return  # absent: the consumers wait for it
    if cluster.get("cluster_enabled"):
        raise ConfigurationError(
            "This Redis is a cluster. Dramatiq's keys of one queue lie in several slots, so no script "
            "can work on them: use a single Redis, with a replica and fail-over if need be."
        )
