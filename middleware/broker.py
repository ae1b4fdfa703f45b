"""The broker: Dramatiq's RedisBroker that loses nothing on the way to the commit and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import dramatiq.worker
import redis
from dramatiq.brokers.redis import RedisBroker
from dramatiq.errors import ConnectionClosed
from redis.backoff import NoBackoff
from redis.retry import Retry

from .consumer import DurableConsumer
from .delivery import Delivery
from .errors import ConfigurationError
from .life import Life
from .outage import Outage
from .scripts import SCRIPTS

if TYPE_CHECKING:
    from dramatiq import Message
    from dramatiq.middleware import Middleware

#: Enough for two round trips' worth of work, few enough to leave some to other workers (T39).
DEFAULT_PREFETCH = 32
#: How long Redis may take to accept a connection and to answer, in seconds.
CONNECT_TIMEOUT_S, ANSWER_TIMEOUT_S = 2.0, 4.0


class DurableRedisBroker(RedisBroker):
    """A RedisBroker whose workers acknowledge only what is settled, and give back the rest.

    It keeps Dramatiq's layout in Redis: a stock RedisBroker of the same namespace can enqueue and
    do maintenance beside it.

    Arguments:
      url: a redis:// URL; None to import without one, then the first call raises.
      namespace: the prefix of all keys.
      heartbeat_timeout: milliseconds of silence after which a worker's messages are handed out
        again. A duplicate is harmless, so this is short.
      ledger: the models of the ledger; not used yet.
      middleware: Dramatiq's default stack where it is None.
      url_variable: the setting that the error about a missing URL names.
      parameters: further arguments of RedisBroker, such as `client`.

    Raises:
      ConfigurationError: at the first call without a URL; at once for a client of a Redis Cluster.
    """

    def __init__(
        self,
        *,
        url: str | None = None,
        namespace: str = "dramatiq",
        heartbeat_timeout: int = 5_000,
        ledger: Any = None,
        middleware: list[Middleware] | None = None,
        client: redis.Redis | None = None,
        url_variable: str = "REDIS_URL",
        **parameters: Any,
    ) -> None:
        if isinstance(client, redis.RedisCluster):
            raise ConfigurationError("Redis Cluster cannot hold Dramatiq's keys: use a single Redis.")
        self.url = url
        self.url_variable = url_variable
        self.ledger = ledger
        self.consumers: dict[str, DurableConsumer] = {}
        self.outage = Outage("Redis", "Workers wait for it; running actors go on")
        self._given = client is not None or bool(parameters)
        if client is None and url:
            client = connect(url)
        super().__init__(  # type: ignore[no-untyped-call] # Dramatiq's has no types
            middleware=middleware,
            namespace=namespace,
            heartbeat_timeout=heartbeat_timeout,
            maintenance_chance=0,  # by the client's clock and one command in a thousand; see Life
            client=client,
            **parameters,
        )
        self.scripts |= {name: self.client.register_script(text) for name, text in SCRIPTS.items()}
        self.add_middleware(Life())

    def check_url(self) -> None:
        """A broker that knows its Redis passes.

        Raises:
          ConfigurationError: names the setting that is missing.
        """
        if not self.url and not self._given:
            raise ConfigurationError(
                f"{self.url_variable} is not set: set it to the address of a Redis, such as "
                f"redis://localhost:6379/0."
            )

    def call(self, script: str, *arguments: Any) -> Any:
        """Run one of our scripts; see `scripts`.

        Raises:
          redis.RedisError: Redis is away or refuses.
          ConfigurationError: no URL was given.
        """
        self.check_url()
        return self.scripts[script](keys=[self.namespace], args=arguments)

    def consume(self, queue_name: str, prefetch: int = 1, timeout: int = 5_000) -> DurableConsumer:
        """The consumer of a queue; always the same one, so that its notes outlive its thread."""
        if not queue_name.endswith(".DQ") and not dramatiq.worker.QUEUE_PREFETCH:
            prefetch = max(prefetch, DEFAULT_PREFETCH)
        consumer = self.consumers.setdefault(queue_name, DurableConsumer(self, queue_name))
        return consumer.open(prefetch)

    def enqueue(self, message: Message[Any], *, delay: int | None = None) -> Message[Any]:
        """Enqueue a message; a delivery whose body has ended is enqueued for a retry.

        Raises:
          ConnectionClosed: Redis is away, or refused.
          InvalidKey: the business key cannot be stored.
        """
        if not isinstance(message, Delivery) or message.running:
            return super().enqueue(message, delay=delay)
        try:
            retry: Message[Any] = super().enqueue(message.as_it_came(), delay=delay)
        except ConnectionClosed:
            message.given_back = True  # T9
            raise
        message.settled = True
        return retry

    def do_enqueue(self, queue_name: str, redis_id: str, data: bytes) -> None:
        self._do("enqueue", queue_name, redis_id, data)

    def do_purge(self, queue_name: str) -> None:
        self._do("purge", queue_name, self.broker_id)

    def do_qsize(self, queue_name: str) -> int:
        return int(self._do("size", queue_name))

    def _do(self, script: str, *arguments: Any) -> Any:
        try:
            return self.call(script, *arguments)
        except redis.RedisError as error:  # T31: Dramatiq knows only its own errors
            raise ConnectionClosed(error) from error

    def ids_in_hand(self, queue_name: str) -> set[bytes]:
        """What Redis believes this worker has in hand of a queue."""
        key = f"{self.namespace}:__acks__.{self.broker_id}.{queue_name}"
        ids: Any = self.client.smembers(key)
        return set(ids)


def connect(url: str) -> redis.Redis:
    """A client that waits for an answer no longer than a worker may, and repeats nothing (T32)."""
    return redis.Redis.from_url(
        url,
        socket_connect_timeout=CONNECT_TIMEOUT_S,
        socket_timeout=ANSWER_TIMEOUT_S,
        socket_keepalive=True,
        retry=Retry(NoBackoff(), 0),
    )
