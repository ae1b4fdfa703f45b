"""SIGTERM ends a worker soon, and what it has not done is done by another."""

from __future__ import annotations

import os
from signal import SIGCONT, SIGSTOP

import psycopg2
import pytest

from .faults.actors import broker, sell, sell_unless_stopped
from .faults.crew import Crew
from .faults.shop import Shop
from .processes import Kind, eventually

pytest_plugins = ("tests.faults.fixtures",)

both_kinds = pytest.mark.parametrize("kind", ["threads", "gevent"])

#: What the processes of a worker may take from SIGTERM to their end.
SOON_S = 15


@both_kinds
def test_prefetched_messages_are_given_back_while_an_actor_still_runs(
    kind: Kind, shop: Shop, crew: Crew
) -> None:
    """T23: at once, not after the running actor has ended; and nothing is fetched any more."""
    # Given a worker that is busy with one message and has more in memory, and one that waits
    shop.hold("body", "running")
    stopping = crew.start(kind=kind, threads=1)
    shop.send("running")
    eventually(lambda: shop.runs("running"), what=crew.output)
    for label in ("a", "b", "c"):
        shop.send(label, max_retries=0)
    eventually(lambda: list(shop.in_hand().values()) == [4], what=crew.output)
    crew.start(kind=kind)

    # When the first is told to stop
    stopping.terminate()

    # Then the other has performed what was waiting, and what comes, while the first still runs
    eventually(lambda: shop.owed() == 1, what=crew.output)
    shop.send("d")
    eventually(lambda: shop.owed() == 1 and shop.orders("d") == 1, what=crew.output)
    assert stopping.returncode is None
    ((runner, *_),) = shop.reached("body", "running")
    assert not {process for label in "abcd" for process, *_ in shop.reached("begin", label)} & {runner}

    # And the running one is finished by the worker that began it
    shop.release("body", "running")
    assert stopping.wait(SOON_S) == 0
    assert shop.owed() == 0
    assert shop.books() == (5, 5, 5, 5)
    assert shop.runs("running") == 1


@both_kinds
def test_an_actor_that_is_notified_of_the_shutdown_is_given_back(kind: Kind, shop: Shop, crew: Crew) -> None:
    """I9: Shutdown rolls back and spends no retry."""
    # Given a body that is to be interrupted when its worker stops
    shop.hold("body", "a")
    stopping = crew.start(kind=kind)
    shop.send("a", actor=sell_unless_stopped, max_retries=0)
    eventually(lambda: shop.runs("a"), what=crew.output)

    # When it is
    stopping.terminate()
    assert stopping.wait(SOON_S) == 0
    assert shop.waiting() == 1

    # Then another worker does the work
    crew.start(kind=kind)
    eventually(lambda: shop.owed() == 0, what=crew.output)
    assert shop.books() == (1, 1, 1, 1)
    assert shop.retries("a") == [0, 0]
    assert shop.dead() == []


@both_kinds
def test_an_idle_worker_ends(kind: Kind, shop: Shop, crew: Crew) -> None:
    worker = crew.start(kind=kind)
    worker.terminate()
    assert worker.wait(SOON_S) == 0
    assert shop.beats() == {}


@both_kinds
def test_a_worker_ends_while_a_delivery_waits_for_postgresql(kind: Kind, shop: Shop, crew: Crew) -> None:
    # Given a delivery that waits, and another message behind it
    worker = crew.start(kind=kind, threads=1)
    shop.servers.postgres.stop()
    shop.send("a", max_retries=0)
    eventually(lambda: shop.reached("begin", "a"), what=worker.output)
    shop.send("b", max_retries=0)

    # When the worker is told to stop
    worker.terminate()

    # Then it ends, and both messages lie in the queue again
    assert worker.wait(SOON_S) == 0
    assert shop.waiting() == 2
    assert not any(shop.in_hand().values())
    assert shop.dead() == []


@both_kinds
def test_a_worker_ends_while_a_delivery_waits_for_its_key(kind: Kind, shop: Shop, crew: Crew) -> None:
    # Given a delivery that waits for a key which somebody holds
    worker = crew.start(kind=kind)
    message = sell.message_with_options(args=("a",), max_retries=0)
    holder = psycopg2.connect(shop.servers.postgres.url)
    holder.cursor().execute(
        "INSERT INTO processed_messages VALUES ('sell', %s, 'another', '', 1)", (message.message_id,)
    )
    broker.enqueue(message)
    eventually(shop.waits_for_a_lock, what=worker.output)

    # When the worker is told to stop
    worker.terminate()

    # Then it ends, and the message lies in the queue again
    assert worker.wait(SOON_S) == 0
    assert shop.waiting() == 1
    assert shop.dead() == []
    holder.close()


@both_kinds
@pytest.mark.parametrize("hung", [False, True], ids=["away", "hung"])
def test_a_worker_ends_while_redis_does_not_answer(hung: bool, kind: Kind, shop: Shop, crew: Crew) -> None:
    # Given a body that has just returned, and a Redis that is away or hangs
    worker = crew.start(kind=kind)
    shop.hold("ack", "a")
    shop.send("a")
    eventually(lambda: shop.reached("ack", "a"), what=worker.output)
    redis = shop.servers.redis
    if hung:
        os.kill(redis.pid, SIGSTOP)
    else:
        redis.stop()
    shop.release("ack", "a")

    # When the worker is told to stop
    worker.terminate()

    # Then it ends
    try:
        worker.wait(SOON_S)
    finally:
        if hung:
            os.kill(redis.pid, SIGCONT)
        else:
            redis.start()

    # And another one finds that the work is done
    crew.start()
    eventually(lambda: shop.owed() == 0, what=crew.output)
    assert shop.books() == (1, 1, 1, 1)
    assert shop.runs("a") == 1
