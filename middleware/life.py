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
from .idempotent import IdempotentConsumer
from .stack import find

if TYPE_CHECKING:
    from dramatiq import Broker, Worker

    from .broker import DurableRedisBroker

logger = logging.getLogger("onetake")

#: Beats in one heartbeat_timeout.
BEATS = 5


class Life(Middleware):
    """Begins and ends what a worker process needs beside Dramatiq's threads; part of the broker."""

    def __init__(self) -> None:
        self._over = Event()
        self._timer: Thread | None = None

    def before_worker_boot(self, broker: Any, worker: Worker) -> None:
        _check_stack(broker)
        _check_redis(broker)
        broker.broker_id = str(uuid4())  # T18: a worker of its own, also in a forked process

    def after_worker_boot(self, broker: Any, worker: Worker) -> None:
        self._over.clear()
        self._timer = Thread(target=self._run, args=(broker,), name="onetake-life", daemon=True)
        self._timer.start()

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
        if self._timer is not None:
            self._timer.join()
        if not broker.outage.lasts:
            try:
                broker.call("leave", broker.broker_id)
            except redis.RedisError as error:
                broker.outage.begins(error)
        broker.consumers.clear()

    def _run(self, broker: DurableRedisBroker) -> None:
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
        logger.info("%d messages of workers that gave no sign of life are handed out again", count)
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


def _check_stack(broker: Broker) -> None:
    if find(broker, IdempotentConsumer) is None:
        raise ConfigurationError(
            "DurableRedisBroker acknowledges only what is settled, and nothing here settles: call "
            "broker.add_middleware(IdempotentConsumer(ProcessedMessage)) before the worker boots."
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
