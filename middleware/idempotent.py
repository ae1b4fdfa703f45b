"""The middleware that makes every actor idempotent.

The transaction is laid around the actor's function, not into hooks: Dramatiq swallows what hooks
raise, so a hook could neither stop an unprotected body nor withhold an acknowledgement (T1). The
function is replaced by a `Performer`; the hooks here only tell it which message is in hand.
"""

from __future__ import annotations

import threading
from time import sleep
from typing import TYPE_CHECKING, Any

import peewee
import psycopg2
from dramatiq.middleware import Middleware

from . import payload, wait_callback
from .continuations import spare_redeliveries
from .database import Database
from .declaration import check_actor, forbid_retries
from .delivery import Delivery, current
from .ends import is_of_the_server
from .inbox import Inbox
from .outage import Outage
from .performer import Performer
from .periodic import periodic_actors

if TYPE_CHECKING:
    from collections.abc import Callable

    from dramatiq import Actor, Broker, Worker
    from dramatiq.broker import MessageProxy

    from .inbox import Processed
    from .tables import ProcessedMessage

#: How long to wait before an absent database is asked again, in seconds; how long before a message
#: that met a full disk is given back.
AWAY_S, PAUSE_S = 0.25, 1.0
#: A statement of ours that takes so much longer than a lock may be waited for has no server.
FROZEN_S = 4.0


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
        #: Dramatiq's threads here, and those of them in a body that has no transaction of ours.
        self.threads: set[int] = set()
        self.in_free_bodies: set[int] = set()
        self.outage = Outage("PostgreSQL", "Deliveries wait for it and spend no retry")

    @property
    def actor_options(self) -> set[str]:
        return {
            "consumer_name",
            "idempotency",
            "on_mismatch",
            "idle_limit_ms",
            "undone_by",
            "periodic",
            "timezone",
        }

    # Waiting for PostgreSQL

    def insist(self, action: Callable[[], None]) -> bool:
        """Do something in the database, however long it is away; False where the worker stops first.

        Raises:
          Whatever the action raises that waiting cannot help.
        """
        while not self.stopping.is_set():
            try:
                action()
            except (peewee.PeeweeException, psycopg2.Error) as error:
                if not is_of_the_server(error):
                    raise
                self.wait_for_database(error)
            else:
                self.outage.ends()
                return True
        return False

    def look_up(self, consumer_name: str, key: str) -> Processed | None:
        """What is committed under a key, None if nothing is or the worker stops; outside a transaction."""
        found: list[Processed | None] = []
        self.insist(lambda: found.append(self.inbox.look_up(consumer_name, key)))
        return found[0] if found else None

    def wait_for_database(self, error: BaseException) -> None:
        """Wait a moment before the database is asked again; after a fail-over another may answer."""
        self.outage.begins(error)
        self.database.discard()
        self.stopping.wait(AWAY_S)

    def pause(self) -> None:
        """Let a server that is in trouble have a moment; it may have become a replica."""
        self.database.discard()
        self.stopping.wait(PAUSE_S)

    # Hooks

    def before_declare_actor(self, broker: Broker, actor: Actor[Any, Any]) -> None:
        check_actor(actor)

    def after_declare_actor(self, broker: Broker, actor: Actor[Any, Any]) -> None:
        if not isinstance(actor.fn, Performer):
            check_actor(actor)
            forbid_retries(actor)
            actor.fn = Performer(self, broker, actor)

    def before_worker_boot(self, broker: Broker, worker: Worker) -> None:
        wait_callback.check()
        self.database.check_url()
        periodic_actors(broker)
        spare_redeliveries(broker)
        self.stopping.clear()

    def after_worker_thread_boot(self, broker: Broker, thread: Any) -> None:
        current.in_worker = True
        self.threads.add(threading.get_ident())

    def after_consumer_thread_boot(self, broker: Broker, thread: Any) -> None:
        self.threads.add(threading.get_ident())

    def before_worker_shutdown(self, broker: Broker, worker: Worker) -> None:
        self.stopping.set()
        threading.Thread(target=self._cut_off_frozen_servers, daemon=True).start()

    def _cut_off_frozen_servers(self) -> None:
        """A worker that stops waits no longer than for any lock, also for a server that is frozen."""
        while self.stopping.is_set():
            waiting = self.threads - self.in_free_bodies
            self.database.cut_off(waiting, self.database.lock_timeout_ms / 1_000 + FROZEN_S)
            sleep(PAUSE_S)

    def before_enqueue(self, broker: Broker, message: Any, delay: int | None) -> None:
        if "idempotency_key" in message.options:
            payload.key_of(message, message.actor_name)

    def before_process_message(self, broker: Broker, message: MessageProxy) -> None:
        current.begin(message)

    def after_process_message(
        self, broker: Broker, message: MessageProxy, *, result: Any = None, exception: Any = None
    ) -> None:
        current.delivery = None

    def after_skip_message(self, broker: Broker, message: MessageProxy) -> None:
        current.delivery = None
        if isinstance(message, Delivery) and not message.given_back:
            message.done = True  # T29
