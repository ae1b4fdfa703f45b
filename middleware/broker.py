"""The broker: where an enqueue goes, and what Redis is asked to do.

A message sent inside a transaction leaves with the commit, one sent outside leaves at once.
"""

from __future__ import annotations

import functools
from contextlib import closing
from typing import TYPE_CHECKING, Any, Literal

import dramatiq.worker
import redis
from dramatiq.brokers.redis import RedisBroker
from dramatiq.errors import ConnectionClosed
from dramatiq.results import Results
from redis.backoff import NoBackoff
from redis.retry import Retry

from .cancel import cancel
from .consumer import DurableConsumer
from .continuations import OutboxGroupCallbacks, in_place_of
from .delivery import Delivery, current
from .errors import ConfigurationError, SentInsideTransaction, WaitInsideTransaction
from .groups import hold
from .idempotent import IdempotentConsumer
from .ledger import Ledger
from .life import Life
from .outage import Outage
from .scripts import SCRIPTS
from .stack import find
from .transaction import manual_transaction
from .workflow import Step, workflow_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    import peewee
    from dramatiq import Message
    from dramatiq.middleware import Middleware

#: Enough for two round trips' worth of work, few enough to leave some to other workers (T39).
DEFAULT_PREFETCH = 32
#: How long Redis may take to accept a connection and to answer, in seconds.
CONNECT_TIMEOUT_S, ANSWER_TIMEOUT_S, WAKE_TIMEOUT_S = 2.0, 4.0, 0.3


class DurableRedisBroker(RedisBroker):
    """A RedisBroker whose workers acknowledge only what is settled, and give back the rest.

    It keeps Dramatiq's layout in Redis: a stock RedisBroker of the same namespace can enqueue and
    do maintenance beside it. With a ledger, whatever waits waits in PostgreSQL.

    Arguments:
      url: a redis:// URL; None to import without one, then the first call raises.
      namespace: the prefix of all keys.
      heartbeat_timeout: milliseconds of silence after which a worker's messages are handed out
        again. A duplicate is harmless, so this is short.
      ledger: the models of the ledger, (OutboxMessage, DeadLetter); None: retries and delays wait
        in Redis, and a message that is sent inside a transaction leaves at once.
      outbox: "always" gives a send outside a transaction one of its own.
      redis_window: so many messages of a queue are in Redis at most; the others wait in the ledger.
      max_message_bytes: larger messages are refused where they are sent to the ledger.
      middleware: Dramatiq's default stack where it is None.
      url_variable: the setting that the error about a missing URL names.
      parameters: further arguments of RedisBroker, such as `client`.

    Raises:
      ConfigurationError: at the first call without a URL; at once for a client of a Redis Cluster
        or a ledger that lacks a model.
    """

    def __init__(
        self,
        *,
        url: str | None = None,
        namespace: str = "dramatiq",
        heartbeat_timeout: int = 5_000,
        ledger: Iterable[type[peewee.Model]] | None = None,
        outbox: Literal["transaction", "always"] = "transaction",
        redis_window: int = 10_000,
        max_message_bytes: int = 1 << 20,
        middleware: list[Middleware] | None = None,
        client: redis.Redis | None = None,
        url_variable: str = "REDIS_URL",
        **parameters: Any,
    ) -> None:
        if isinstance(client, redis.RedisCluster):
            raise ConfigurationError("Redis Cluster cannot hold Dramatiq's keys: use a single Redis.")
        if outbox not in ("transaction", "always"):
            raise ConfigurationError(f"outbox is {outbox!r}; it must be 'transaction' or 'always'.")
        for name, value in (("redis_window", redis_window), ("max_message_bytes", max_message_bytes)):
            if type(value) is not int or value < 1:
                raise ConfigurationError(f"{name} is {value!r}; it must be a whole number of at least 1.")
        self.url = url
        self.url_variable = url_variable
        self.ledger = None if ledger is None else Ledger(ledger, max_message_bytes)
        self.always = outbox == "always"
        self.redis_window = redis_window
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
        # A wake-up is a courtesy: a commit does not wait for a Redis that hangs.
        waker = connect(url, WAKE_TIMEOUT_S, WAKE_TIMEOUT_S) if url else self.client
        self._waker = waker.register_script(SCRIPTS["wake"])
        self.add_middleware(Life())
        if self.ledger is not None:
            self.add_middleware(OutboxGroupCallbacks())

    @property
    def guard(self) -> IdempotentConsumer:
        """The IdempotentConsumer in the stack.

        Raises:
          ConfigurationError: there is none; a worker does not boot without one.
        """
        guard = find(self, IdempotentConsumer)
        if guard is None:
            raise ConfigurationError(
                "DurableRedisBroker acknowledges only what is settled, and nothing here settles: call "
                "broker.add_middleware(IdempotentConsumer(ProcessedMessage)) before the worker boots."
            )
        return guard

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

    def add_middleware(self, middleware: Middleware, **place: Any) -> None:
        """Add a middleware as Dramatiq does, or what stands for it in a stack with a ledger.

        Results are then not waited for where that cannot end.
        """
        if self.ledger is not None:
            middleware = in_place_of(middleware)
        super().add_middleware(middleware, **place)
        if isinstance(middleware, Results):
            self._guard_waits(middleware.backend)

    def _guard_waits(self, backend: Any) -> None:
        get_result = backend.get_result

        @functools.wraps(get_result)
        def guarded(message: Any, *, block: bool = False, timeout: int | None = None) -> Any:
            ledger = self.ledger
            if block and ledger is not None and self._leaves_later(ledger, message.message_id):
                raise WaitInsideTransaction(
                    f"Message {message.message_id!r} leaves with the commit of the open transaction, so "
                    f"its result cannot come before. Wait for it after the commit."
                )
            return get_result(message, block=block, timeout=timeout)

        backend.get_result = guarded

    @staticmethod
    def _leaves_later(ledger: Ledger, message_id: str) -> bool:
        """Whether a message leaves with the open transaction, or when the running body has ended."""
        if current.collects is not None:
            wanted = message_id.encode()
            values = (value for _, values in current.collects.sent for value in values)
            return any(wanted in value for value in values if isinstance(value, bytes))
        return ledger.database.has_begun() and ledger.waits_for(message_id)

    def consume(self, queue_name: str, prefetch: int = 1, timeout: int = 5_000) -> DurableConsumer:
        """The consumer of a queue; always the same one, so that its notes outlive its thread."""
        if not queue_name.endswith(".DQ") and not dramatiq.worker.QUEUE_PREFETCH:
            prefetch = max(prefetch, DEFAULT_PREFETCH)
        consumer = self.consumers.setdefault(queue_name, DurableConsumer(self, queue_name))
        return consumer.open(prefetch)

    def enqueue(self, message: Message[Any], *, delay: int | None = None) -> Message[Any]:
        """Send a message: into the ledger if it has to wait for anything, else to Redis.

        Arguments:
          message: its option ``outbox=False`` sends it at once, also inside a transaction.
          delay: milliseconds.

        Raises:
          ConnectionClosed: it was to leave at once, and Redis is away or refused.
          InvalidKey, MessageTooLarge: it cannot be stored.
          ConfigurationError: ``outbox=False`` together with a delay.
        """
        if isinstance(message, Delivery) and not message.running:
            return self._retry(message, delay)
        if current.group is not None and hold(self, _without_choice(message), delay):
            return message
        at_once = message.options.get("outbox") is False
        message = _without_choice(message)
        if at_once and delay is not None:
            raise ConfigurationError(
                "outbox=False sends at once, so it goes with no delay: drop one of the two."
            )
        if self.ledger is None:
            return super().enqueue(message, delay=delay)
        waits = delay is not None or self.always or self.ledger.database.has_begun()
        if at_once or not (waits or current.collects):
            self.ledger.check_size(message)
            return super().enqueue(message)
        self.emit_before("enqueue", message, delay)
        self._owe(self.ledger, self.ledger.values_of(message, delay or 0, current.parent_id), message, delay)
        self.emit_after("enqueue", message, delay)
        return message

    def _owe(self, ledger: Ledger, values: tuple[Any, ...], message: Message[Any], delay: int | None) -> None:
        """Write a message into the ledger, now or with the end of the delivery that collects it."""
        collects, running = current.collects, current.delivery
        if collects is not None:
            if collects.outside and ledger.database.has_begun():
                raise SentInsideTransaction(
                    f"The body of actor {collects.actor_name!r} sent message {message.message_id!r} inside "
                    f"a transaction of its own, and what it sends leaves with the one after it: send "
                    f"outside the block, or return first."
                )
            collects.sent.append((ledger.insert, values))
            return
        if running is not None and running.owed is not None and running.owed[:2] == values[:2]:
            # A body that sends its own message again: its row is replaced, and not taken along with the
            # end of this attempt.
            ledger.owe_again(running.attempt, message, delay or 0)
        else:
            ledger.owe(values)
        if not delay:
            self.wake_after_commit()

    def _retry(self, delivery: Delivery, delay: int | None) -> Message[Any]:
        """A delivery that has ended is sent again; it is settled when that is safe (T9)."""
        retry = delivery.as_it_came()
        if self.ledger is not None:
            self.emit_before("enqueue", retry, delay)
            delivery.retry = (retry, delay or 0)  # stored by `settle`
            self.emit_after("enqueue", retry, delay)
            return retry
        try:
            retry = super().enqueue(retry, delay=delay)
        except ConnectionClosed:
            delivery.given_back = True
            raise
        delivery.settled = True
        return retry

    def outbox_statement(
        self,
        message: Message[Any],
        style: Literal["format", "numeric"] = "format",
        delay: int = 0,
    ) -> tuple[str, tuple[Any, ...]]:
        """The statement that sends a message with anybody's transaction of the same database.

        Arguments:
          message: made by an actor's `message()`.
          style: of the parameters: "format" for %s, "numeric" for $1.
          delay: milliseconds.

        Returns:
          The statement and its values. The message leaves at most 250 ms after the commit, or at
          once after `wake()`.
        """
        if self.ledger is None:
            raise ConfigurationError("Without a ledger there is no outbox: hand the broker ledger=(...).")
        if style not in ("format", "numeric"):
            raise ConfigurationError(f"style is {style!r}; it must be 'format' or 'numeric'.")
        message = _without_choice(message)
        self.emit_before("enqueue", message, delay or None)
        text, values = self.ledger.insert, self.ledger.values_of(message, delay)
        if style == "numeric":
            for number in range(1, len(values) + 1):
                text = text.replace("%s", f"${number}", 1)
        return text, values

    def enqueue_on(self, connection: Any, message: Message[Any], *, delay: int = 0) -> Message[Any]:
        """Send a message with the transaction that is open on any DB-API connection.

        Arguments:
          connection: of the ledger's database: psycopg2, psycopg, Django's, SQLAlchemy's raw one.
          message: made by an actor's `message()`.
          delay: milliseconds.
        """
        with closing(connection.cursor()) as cursor:
            cursor.execute(*self.outbox_statement(message, delay=delay))
        self.emit_after("enqueue", message, delay or None)
        return message

    def cancel(self, message: Message[Any]) -> bool:
        """Cancel a message: True if it will not run, False if it has run or is running.

        Its key is taken and its row deleted in one transaction: the caller's, or one of its own. It
        counts as failed: its chain ends, its group does not complete, a wait for its result raises,
        and what its pipeline did before is undone (``undone_by``).

        Raises:
          ConfigurationError: its actor's idempotency is not "transaction", or there is no ledger.
        """
        return cancel(self, message)

    def workflow_of(self, message_id: str) -> Step | None:
        """What set a message off and what it set off, with the state of each; None: nothing is known.

        Raises:
          ConfigurationError: there is no ledger.
        """
        return workflow_of(self, message_id)

    def wake(self) -> None:
        """Tell a relay that something is due now; without that it looks 250 ms later (T16)."""
        if not self.url and not self._given:
            return  # a process that only sends needs no Redis
        try:
            self._waker(keys=[self.namespace])
        except redis.RedisError as error:
            self.outage.begins(error)  # the poll finds it

    def wake_after_commit(self) -> None:
        """Wake a relay when the open transaction has committed; once, however much it sends."""
        assert self.ledger is not None
        database = self.ledger.database
        # peewee calls nobody after a COMMIT that it did not send: the poll finds the message.
        if isinstance(database.top_transaction(), manual_transaction):
            return
        if not database.will_call(self.wake):
            database.after_commit(self.wake)

    def is_full(self, queue_name: str) -> bool:
        """Whether Redis has nearly as many messages of a queue as it may have."""
        try:
            size: Any = self.client.hlen(f"{self.namespace}:{queue_name}.msgs")
        except redis.ResponseError:
            return False  # publishing to it will say what is wrong
        return bool(size > 0.9 * self.redis_window)

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


def _without_choice(message: Message[Any]) -> Message[Any]:
    """The message without the option that says where it goes."""
    if "outbox" not in message.options:
        return message
    return message._replace(options={key: value for key, value in message.options.items() if key != "outbox"})


def connect(
    url: str, answer_timeout_s: float = ANSWER_TIMEOUT_S, connect_timeout_s: float = CONNECT_TIMEOUT_S
) -> redis.Redis:
    """A client that waits for an answer no longer than a worker may, and repeats nothing (T32)."""
    return redis.Redis.from_url(
        url,
        socket_connect_timeout=connect_timeout_s,
        socket_timeout=answer_timeout_s,
        socket_keepalive=True,
        encoding_errors="surrogateescape",  # ids that somebody else made are bytes
        retry=Retry(NoBackoff(), 0),
    )
