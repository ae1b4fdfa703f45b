"""The story of a delivery: `Performer.perform`."""

from __future__ import annotations

import functools
import logging
from math import isinf
from threading import get_ident
from typing import TYPE_CHECKING, Any, NoReturn

from dramatiq.results import Results

from . import payload, time_limit
from .continuations import Continuation
from .declaration import IDEMPOTENCY
from .delivery import Delivery, current
from .ends import End, judge, judge_outside
from .errors import Cancelled, GivenBack, NoDelivery, PayloadMismatch, PermanentError
from .inbox import CANCELLED, Claim, KeyTaken, Limits, Processed, Stage
from .stack import find_all

if TYPE_CHECKING:
    from collections.abc import Callable

    from dramatiq import Actor, Broker

    from .idempotent import IdempotentConsumer

logger = logging.getLogger("onetake")

#: A transaction that lost a deadlock or a serialisation is run again this often at once.
MAX_RERUNS = 3
#: How much older than its actor's time limit a transaction may grow.
TRANSACTION_GRACE_MS = 30_000
#: More than this no limit of PostgreSQL can be.
MAX_LIMIT_MS = 2**31 - 1


class Performer:
    """What stands in an actor's `fn`: its body, guarded by the key of the message in hand."""

    def __init__(self, guard: IdempotentConsumer, broker: Broker, actor: Actor[Any, Any]) -> None:
        self.guard = guard
        self.broker = broker
        self.actor = actor
        self.body: Callable[..., Any] = actor.fn
        self.database = guard.database
        self.name: str = actor.options.get("consumer_name", actor.actor_name)
        self.idempotency: str = actor.options.get("idempotency", IDEMPOTENCY[0])
        #: Whether a message leaves a key, so that it takes effect once.
        self.keyed = self.idempotency != "off"
        functools.update_wrapper(self, actor.fn)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        delivery = current.delivery
        if delivery is None or current.taken or delivery.actor_name != self.actor.actor_name:
            return self.call(args, kwargs)
        current.taken = True
        time_limit.hold(self.broker)
        self.database.settle_down()  # T4
        try:
            if self.idempotency == "transaction":
                return self.perform(delivery, args, kwargs)
            if self.idempotency == "external":
                return self.perform_outside(delivery, args, kwargs)
            return self.run(delivery, args, kwargs)
        except GivenBack:
            raise
        except BaseException as error:
            current.fail(delivery)
            if (
                isinstance(error, PermanentError) and not delivery.cancelled
            ):  # Dramatiq logs only the name of what an actor `throws`
                logger.error("Message %r is a dead letter. %s", delivery.message_id, error)
                delivery.options.pop("throws", None)  # it would hide what the actor throws
            raise

    def perform(self, delivery: Delivery, args: Any, kwargs: Any) -> Any:
        """Perform one delivery: key and body in one transaction, then settled."""

        def body(reruns: int) -> Any:
            original = delivery.as_it_came() if reruns else None  # T17
            if original is not None:
                return self.run_body(delivery, original.args, original.kwargs)
            return self.run_body(delivery, args, kwargs)

        key = payload.key_of(delivery._message, self.name)
        return self.transact(delivery, key, payload.digest(args, kwargs), body)

    def perform_outside(self, delivery: Delivery, args: Any, kwargs: Any) -> Any:
        """Perform one delivery whose effects are elsewhere: the body first, then one transaction.

        The look-up only saves work; two deliveries that meet run the body twice at once, with the same
        `idempotency_key()`, and the key that is inserted afterwards decides.
        """
        key = payload.key_of(delivery._message, self.name)
        digest = payload.digest(args, kwargs)
        processed = self.guard.look_up(self.name, key)
        if processed is not None:
            return self.answer(delivery, key, digest, processed)
        delivery.outside = self.name, key
        current.collects = None if delivery.foreign else delivery
        try:
            result = self.run_body(delivery, args, kwargs)
        except BaseException as error:
            end = judge_outside(error, lost=self.database.is_lost(error))
            if end is End.FAIL:
                raise
            self.give_back(delivery, end, error)
        finally:
            delivery.outside = current.collects = None
            self.database.settle_down()

        def body(_reruns: int) -> Any:
            for statement in delivery.sent:
                self.database.execute_sql(*statement)
            if delivery.sent:
                self.broker.wake_after_commit()  # type: ignore[attr-defined] # ours, or nothing was sent
            return result

        return self.transact(delivery, key, digest, body)

    def transact(self, delivery: Delivery, key: str, digest: bytes, body: Callable[[int], Any]) -> Any:
        """The guarded transaction: the key, a body, what follows; until it has an end.

        Arguments:
          body: takes the number of times that it ran before.
        """
        limits, owed, inbox = self.limits_of(delivery), delivery.owed, self.guard.inbox
        reruns = 0
        while not self.guard.stopping.is_set():
            claim = Claim(inbox, self.name, key, delivery.message_id, digest, limits, owed)
            try:
                with self.database.atomic(claim=claim):
                    self.guard.outage.ends()
                    result = body(reruns)
                    if result is not None and self.stores_result_of(delivery):
                        inbox.store_result(claim, result)
                    self.set_off(delivery, result)
                delivery.settled = True
                return result
            except KeyTaken as taken:
                self.guard.outage.ends()
                return self.answer(delivery, key, digest, taken.processed)
            except BaseException as error:
                if claim.stage is Stage.COMMITTED:
                    logger.exception("after_commit() of message %r failed", delivery.message_id)
                    delivery.settled = True
                    return result
                end, reason = judge(error, claim, self.database.lock_timeout_ms)
                if end is End.WAIT:
                    self.guard.wait_for_database(error)
                elif end is End.RUN_AGAIN and reruns < MAX_RERUNS:
                    reruns += 1
                elif end in (End.RUN_AGAIN, End.FAIL):
                    if reason is error:
                        raise
                    raise reason from error
                else:
                    self.give_back(delivery, end, error)
        self.give_back(delivery, End.GIVE_BACK, None)

    def run(self, delivery: Delivery, args: Any, kwargs: Any) -> Any:
        """Perform a delivery whose actor opted out: no transaction and no key."""
        delivery.unguarded = True
        me = get_ident()
        self.guard.in_free_bodies.add(me)
        try:
            result = self.run_body(delivery, args, kwargs)
        finally:
            self.guard.in_free_bodies.discard(me)
        delivery.finish(result, follows=self.follows(delivery))
        return result

    def call(self, args: Any, kwargs: Any) -> Any:
        """The actor is called as a function: it joins a transaction, or has one without a key.

        Raises:
          NoDelivery: in a worker thread that has no message in hand (T1).
        """
        if current.delivery is None and current.in_worker:
            raise NoDelivery(
                f"Actor {self.actor.actor_name!r} was called in a worker thread that has no message in "
                f"hand, so there is no key. A hook failed before; its error is in the log."
            )
        if self.idempotency != "transaction" or self.database.in_transaction():
            return self.body(*args, **kwargs)
        with self.database.atomic():
            return self.body(*args, **kwargs)

    def run_body(self, delivery: Delivery, args: Any, kwargs: Any) -> Any:
        time_limit.release(self.broker, delivery, self.actor)
        try:
            delivery.running = True
            return self.body(*args, **kwargs)
        finally:
            delivery.running = False
            time_limit.hold(self.broker)

    def follows(self, delivery: Delivery) -> bool:
        """Whether the message sets something off."""
        return any(one.follows(delivery, self.actor) for one in self.continuations)

    def set_off(self, delivery: Delivery, result: Any) -> None:
        """Send what the message sets off, in the caller's transaction (T10)."""
        for one in self.continuations:
            if one.follows(delivery, self.actor):
                one.set_off(self.broker, delivery, self.actor, result)  # type: ignore[arg-type] # ours has them

    @property
    def continuations(self) -> list[Continuation]:
        return find_all(self.broker, Continuation)

    def answer(self, delivery: Delivery, key: str, digest: bytes, processed: Processed) -> Any:
        """The stored result for a message whose key is committed (I5).

        Raises:
          PayloadMismatch: the key was used for other arguments.
          Cancelled: it was taken by a cancellation.
        """
        if processed.digest_version == CANCELLED:
            delivery.cancelled = True
            raise Cancelled(f"Message {delivery.message_id!r} for consumer {self.name!r} was cancelled.")
        if processed.digest_version == payload.DIGEST_VERSION and processed.digest != digest:
            text = (
                f"Message {delivery.message_id!r} for consumer {self.name!r} has the key {key!r} of "
                f"message {processed.performed_by!r}, but other arguments"
            )
            if self.actor.options.get("on_mismatch") != "answer":
                raise PayloadMismatch(f'{text}. Send another key, or declare on_mismatch="answer".')
            logger.warning("%s; it was answered with the stored result", text)
        current.redelivered = processed.performed_by == delivery.message_id
        # Another message with the same business key sets off what is its own.
        delivery.answered = not current.redelivered
        delivery.finish(processed.result, follows=delivery.answered and self.follows(delivery))
        logger.info(
            "Duplicate answered: message %r for consumer %r, key %r was performed by message %r",
            delivery.message_id, self.name, key, processed.performed_by,
        )  # fmt: skip
        return processed.result

    def give_back(self, delivery: Delivery, end: End, error: BaseException | None) -> NoReturn:
        """End a delivery without an outcome: the message comes again, no retry is spent."""
        if end is End.PAUSE:
            self.guard.pause()
        reason = " ".join(str(error).split()) if error is not None else "the worker stops"
        text = f"Message {delivery.message_id!r} for consumer {self.name!r} is given back: {reason}"
        delivery.given_back = True
        if delivery.foreign:  # its broker acknowledges in any case, so it needs a copy
            self.broker.enqueue(delivery.as_it_came())
        delivery.options["store_results"] = False  # T22: Results would store None
        logger.info(text)
        raise GivenBack(text) from error

    def limits_of(self, delivery: Delivery) -> Limits:
        """The limits of this delivery's transaction; the database's own object if they are its."""
        default = self.database.limits
        limit_ms = time_limit.limit_ms(self.broker, delivery, self.actor)
        own_limit = "time_limit" in self.actor.options or "time_limit" in delivery.options
        transaction_ms = default.transaction_ms
        if transaction_ms and (own_limit or limit_ms + TRANSACTION_GRACE_MS > transaction_ms):
            transaction_ms = 0 if isinf(limit_ms) else min(int(limit_ms) + TRANSACTION_GRACE_MS, MAX_LIMIT_MS)
        limits = Limits(self.actor.options.get("idle_limit_ms", default.idle_ms), transaction_ms)
        return default if limits == default else limits

    def stores_result_of(self, delivery: Delivery) -> bool:
        """Whether the result is stored beside the key: a business key's is, or one for Results."""
        if "idempotency_key" in delivery.options:
            return True
        # An application may have added a Results of its own beside the one that is there.
        default = any(m.store_results for m in self.broker.middleware if isinstance(m, Results))
        stores = self.actor.options.get("store_results", default)
        return bool(delivery.options.get("store_results", stores))
