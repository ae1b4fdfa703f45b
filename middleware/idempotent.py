"""The middleware that makes every actor idempotent; `Consumer.perform` is the story of a delivery.

The transaction is laid around the actor's function, not into hooks: Dramatiq swallows what hooks
raise, so a hook could neither stop an unprotected body nor withhold an acknowledgement (T1).
"""

from __future__ import annotations

import functools
import logging
import threading
from math import isinf
from typing import TYPE_CHECKING, Any, NoReturn

from dramatiq.middleware import Middleware
from dramatiq.results import Results

from . import payload, time_limit, wait_callback
from .continuations import spare_redeliveries
from .database import Database
from .declaration import check_actor, forbid_retries
from .delivery import Delivery, current, restored
from .ends import End, judge
from .errors import GivenBack, NoDelivery, PayloadMismatch, PermanentError
from .inbox import Claim, Inbox, KeyTaken, Limits, Processed, Stage
from .outage import Outage

if TYPE_CHECKING:
    from collections.abc import Callable

    from dramatiq import Actor, Broker, Worker
    from dramatiq.broker import MessageProxy

    from .tables import ProcessedMessage

logger = logging.getLogger("onetake")

#: A transaction that lost a deadlock or a serialisation is run again this often at once.
MAX_RERUNS = 3
#: How long to wait before an absent database is asked again: doubled from first to longest, which
#: is also the pause before a message that met a full disk is given back.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 1.0
#: How much older than its actor's time limit a transaction may grow.
TRANSACTION_GRACE_MS = 30_000
#: More than this no limit of PostgreSQL can be.
MAX_LIMIT_MS = 2**31 - 1


class IdempotentConsumer(Middleware):
    """Every message of the broker's actors takes effect once, however often it is delivered.

    Each actor runs in ``with database.atomic():``, which begins by inserting the key (consumer
    name, message id); Dramatiq acknowledges after the commit. The order of the stack does not
    matter, and actors declared before this middleware was added are covered too.

    Arguments:
      model: the application's concrete ProcessedMessage; its database must be a `Database`.

    Raises:
      ConfigurationError: the model's database is no `Database`; later: an actor that cannot be
        guarded, or a worker that is not fit to boot.
    """

    def __init__(self, model: type[ProcessedMessage]) -> None:
        self.database = Database.of(model)
        self.inbox = Inbox(model)
        self.stopping = threading.Event()
        self.outage = Outage("PostgreSQL", "Deliveries wait for it and spend no retry")

    @property
    def actor_options(self) -> set[str]:
        return {"consumer_name", "idempotency", "on_mismatch", "idle_limit_ms"}

    def before_declare_actor(self, broker: Broker, actor: Actor[Any, Any]) -> None:
        check_actor(actor)

    def after_declare_actor(self, broker: Broker, actor: Actor[Any, Any]) -> None:
        if not isinstance(actor.fn, Consumer):
            check_actor(actor)
            forbid_retries(actor)
            actor.fn = Consumer(self, broker, actor)

    def before_worker_boot(self, broker: Broker, worker: Worker) -> None:
        wait_callback.check()
        self.database.check_url()
        spare_redeliveries(broker)
        self.stopping.clear()

    def after_worker_thread_boot(self, broker: Broker, thread: Any) -> None:
        current.in_worker = True

    def before_worker_shutdown(self, broker: Broker, worker: Worker) -> None:
        self.stopping.set()

    def before_enqueue(self, broker: Broker, message: Any, delay: int | None) -> None:
        if "idempotency_key" in message.options:
            payload.key_of(message, message.actor_name)

    def before_process_message(self, broker: Broker, message: MessageProxy) -> None:
        current.message = message
        current.taken = False
        current.raw = message.raw if isinstance(message, Delivery) else message.encode()

    def after_process_message(
        self, broker: Broker, message: MessageProxy, *, result: Any = None, exception: Any = None
    ) -> None:
        current.message = None

    def after_skip_message(self, broker: Broker, message: MessageProxy) -> None:
        current.message = None
        if isinstance(message, Delivery) and not message.given_back:
            message.settled = True  # T29: a message that is skipped ends here


class Consumer:
    """What stands in an actor's `fn`: its body, guarded by the key of the message in hand."""

    def __init__(self, guard: IdempotentConsumer, broker: Broker, actor: Actor[Any, Any]) -> None:
        self.guard = guard
        self.broker = broker
        self.actor = actor
        self.body: Callable[..., Any] = actor.fn
        self.database = guard.database
        self.name: str = actor.options.get("consumer_name", actor.actor_name)
        self.guarded: bool = actor.options.get("idempotency") != "off"
        functools.update_wrapper(self, actor.fn)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        message = current.message
        if message is None or current.taken or message.actor_name != self.actor.actor_name:
            return self.call(args, kwargs)
        current.taken = True
        time_limit.hold(self.broker)
        self.database.settle_down()  # T4
        try:
            return (self.perform if self.guarded else self.run)(message, args, kwargs)
        except PermanentError as error:
            # Dramatiq logs only the name of an error that an actor `throws`.
            logger.error("Message %r is a dead letter. %s", message.message_id, error)
            message.options.pop("throws", None)  # it would hide what the actor throws
            raise

    def perform(self, message: MessageProxy, args: Any, kwargs: Any) -> Any:
        """Perform one delivery: key and body in one transaction, then settled."""
        key = payload.key_of(message._message, self.name)
        digest = payload.digest(args, kwargs)
        limits = self.limits_of(message)
        pause_s, reruns = FIRST_PAUSE_S, 0
        while not self.guard.stopping.is_set():
            claim = Claim(self.guard.inbox, self.name, key, message.message_id, digest, limits)
            try:
                with self.database.atomic(claim=claim):
                    self.guard.outage.ends()
                    result = self.run_body(message, args, kwargs)
                    if result is not None and self.stores_result_of(message):
                        self.guard.inbox.store_result(claim, result)
                return self.settle(message, result)
            except KeyTaken as taken:
                self.guard.outage.ends()
                return self.settle(message, self.answer(message, claim, taken.processed))
            except BaseException as error:
                if claim.stage is Stage.COMMITTED:
                    logger.exception("after_commit() of message %r failed", message.message_id)
                    return self.settle(message, result)
                end, reason = judge(error, claim, self.database.lock_timeout_ms)
                if end is End.WAIT:
                    self.guard.outage.begins(error)
                    self.database.discard()  # after a fail-over, another server may answer
                    self.guard.stopping.wait(pause_s)
                    pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
                elif end is End.RUN_AGAIN and reruns < MAX_RERUNS:
                    reruns += 1
                    args, kwargs = self.arguments_as_they_came(message)
                elif end in (End.RUN_AGAIN, End.FAIL):
                    self.fail(message, error, reason)
                else:
                    self.give_back(message, end, error)
        self.give_back(message, End.GIVE_BACK, None)

    def run(self, message: MessageProxy, args: Any, kwargs: Any) -> Any:
        """Perform a delivery whose actor opted out: no transaction and no key."""
        message.unguarded = True  # type: ignore[attr-defined] # foreign proxies carry it too
        try:
            return self.settle(message, self.run_body(message, args, kwargs))
        except BaseException as error:  # noqa: BLE001 - it is raised again
            self.fail(message, error, error)

    def call(self, args: Any, kwargs: Any) -> Any:
        """The actor is called as a function: it joins a transaction, or has one without a key.

        Raises:
          NoDelivery: in a worker thread that has no message in hand (T1).
        """
        if current.message is None and current.in_worker:
            raise NoDelivery(
                f"Actor {self.actor.actor_name!r} was called in a worker thread that has no message in "
                f"hand, so there is no key. A hook failed before; its error is in the log."
            )
        if not self.guarded or self.database.in_transaction():
            return self.body(*args, **kwargs)
        with self.database.atomic():
            return self.body(*args, **kwargs)

    def run_body(self, message: MessageProxy, args: Any, kwargs: Any) -> Any:
        time_limit.release(self.broker, message, self.actor)
        try:
            message.running = True  # type: ignore[attr-defined] # foreign proxies carry it too
            return self.body(*args, **kwargs)
        finally:
            message.running = False  # type: ignore[attr-defined]
            time_limit.hold(self.broker)

    def settle(self, message: MessageProxy, result: Any) -> Any:
        """The end is safe: from here on the message may be acknowledged (T22)."""
        message.settled = True  # type: ignore[attr-defined] # foreign proxies carry it too
        return result

    def answer(self, message: MessageProxy, claim: Claim, processed: Processed) -> Any:
        """The stored result for a message whose key is committed (I5).

        Raises:
          PayloadMismatch: the key was used for other arguments.
        """
        again = processed.performed_by == message.message_id
        same = processed.digest_version != payload.DIGEST_VERSION or processed.digest == claim.digest
        if not same:
            text = (
                f"Message {message.message_id!r} for consumer {self.name!r} has the key {claim.key!r} of "
                f"message {processed.performed_by!r}, but other arguments"
            )
            if self.actor.options.get("on_mismatch") != "answer":
                raise PayloadMismatch(f'{text}. Send another key, or declare on_mismatch="answer".')
            logger.warning("%s; it was answered with the stored result", text)
        message.redelivered = again  # type: ignore[attr-defined] # foreign proxies carry it too
        logger.info(
            "Duplicate answered: message %r for consumer %r, key %r was performed by message %r",
            message.message_id, self.name, claim.key, processed.performed_by,
        )  # fmt: skip
        return processed.result

    def fail(self, message: MessageProxy, error: BaseException, reason: BaseException) -> NoReturn:
        """Hand the error to Dramatiq, whose Retries decides; it sees the message as it came (T17)."""
        message._message = restored(message._message, current.raw)
        if reason is error:
            raise error
        raise reason from error

    def give_back(self, message: MessageProxy, end: End, error: BaseException | None) -> NoReturn:
        """End a delivery without an outcome: the message comes again, no retry is spent."""
        if end is End.PAUSE:
            self.database.discard()  # the server may have become a replica
            self.guard.stopping.wait(LONGEST_PAUSE_S)
        reason = " ".join(str(error).split()) if error is not None else "the worker stops"
        text = f"Message {message.message_id!r} for consumer {self.name!r} is given back: {reason}"
        if isinstance(message, Delivery):
            message.given_back = True
        else:  # a foreign broker acknowledges in any case, so it needs a copy
            self.broker.enqueue(restored(message._message, current.raw))
        message.options["store_results"] = False  # T22: Results would store None
        logger.info(text)
        raise GivenBack(text) from error

    def arguments_as_they_came(self, message: MessageProxy) -> tuple[Any, Any]:
        original = restored(message._message, current.raw)
        return original.args, original.kwargs

    def limits_of(self, message: MessageProxy) -> Limits:
        """The limits of this delivery's transaction; the database's own object if they are its."""
        default = self.database.limits
        limit_ms = time_limit.limit_ms(self.broker, message, self.actor)
        own_limit = "time_limit" in self.actor.options or "time_limit" in message.options
        transaction_ms = default.transaction_ms
        if transaction_ms and (own_limit or limit_ms + TRANSACTION_GRACE_MS > transaction_ms):
            transaction_ms = 0 if isinf(limit_ms) else min(int(limit_ms) + TRANSACTION_GRACE_MS, MAX_LIMIT_MS)
        limits = Limits(self.actor.options.get("idle_limit_ms", default.idle_ms), transaction_ms)
        return default if limits == default else limits

    def stores_result_of(self, message: MessageProxy) -> bool:
        """Whether the result is stored beside the key: a business key's is, or one for Results."""
        if "idempotency_key" in message.options:
            return True
        # An application may have added a Results of its own beside the one that is there.
        default = any(m.store_results for m in self.broker.middleware if isinstance(m, Results))
        stores = self.actor.options.get("store_results", default)
        return bool(message.options.get("store_results", stores))
