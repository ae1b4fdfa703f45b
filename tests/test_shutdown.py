"""SIGTERM ends a worker soon, and what it has not done is done by another."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import psutil
import psycopg2
import pytest

from .faults.actors import sell, sell_elsewhere, sell_unless_stopped
from .faults.outages import paused, stopped
from .processes import Kind, eventually

if TYPE_CHECKING:
    from .faults.crew import Crew
    from .faults.shop import Shop

pytest_plugins = ("tests.faults.fixtures",)

both_kinds = pytest.mark.parametrize("kind", ["threads", "gevent"])

#: What the processes of a worker may take from SIGTERM to their end.
SOON_S = 15
#: What they had in hand comes back soon.
QUICK_MS = 1_000


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


def test_idle_workers_end_and_take_their_leave(shop: Shop, crew: Crew) -> None:
    # Given a worker of threads and one of greenlets, both alive
    crew.pair_of_kinds()
    eventually(lambda: len(shop.beats()) == 2)

    # When they are told to stop
    crew.stop(SOON_S)

    # Then they have ended, and nobody needs to look for them
    assert shop.beats() == {}


def test_workers_end_while_deliveries_wait_for_postgresql(shop: Shop, crew: Crew) -> None:
    """I9: what waits is given back as it came."""
    # Given workers that have a delivery each, while PostgreSQL is away, and more in memory
    crew.pair_of_kinds(threads=1, env={"dramatiq_queue_prefetch": "2"})
    shop.servers.postgres.stop()
    labels = ["a", "b", "c", "d"]
    for label in labels:
        shop.send(label, max_retries=0)
    eventually(lambda: sum(len(shop.reached("begin", label)) for label in labels) == 2)
    eventually(lambda: list(shop.in_hand().values()) == [2, 2])

    # When they are told to stop
    crew.stop(SOON_S)

    # Then they have ended, and all messages lie in the queue again
    assert shop.waiting() == 4
    assert not any(shop.in_hand().values())
    assert shop.dead() == []


def test_workers_end_while_deliveries_wait_for_their_key(shop: Shop, crew: Crew) -> None:
    """I9: what waits is given back as it came."""
    # Given workers that wait for a key which somebody else holds
    crew.pair_of_kinds(threads=1, env={"dramatiq_queue_prefetch": "1"})
    message = sell.message_with_options(args=("a",), max_retries=0)
    holder = psycopg2.connect(shop.servers.postgres.url)
    holder.cursor().execute(
        "INSERT INTO processed_messages VALUES ('sell', %s, 'another', '', 1)", (message.message_id,)
    )
    shop.deliver(message, times=2)
    eventually(lambda: len(shop.reached("begin", "a")) == 2, what=crew.output)

    # When they are told to stop
    crew.stop(SOON_S)

    # Then they have ended, and both copies lie in the queue again
    assert shop.waiting() == 2
    assert not any(shop.in_hand().values())
    assert shop.dead() == []
    holder.close()


def test_workers_end_while_deliveries_wait_for_a_frozen_postgresql_t6(shop: Shop, crew: Crew) -> None:
    """A thread in libpq hears of nothing, so its connection is cut off."""
    # Given workers, and a PostgreSQL of which every process stands still
    crew.pair_of_kinds(threads=1, env={"dramatiq_queue_prefetch": "1"})
    shop.deliver(sell.message("warm"), times=2)
    eventually(lambda: shop.owed() == 0, what=crew.output)
    server = psutil.Process(shop.servers.postgres.pid)
    with ExitStack() as frozen:
        for process in (server, *server.children()):
            frozen.enter_context(paused(process.pid))
        shop.deliver(sell.message_with_options(args=("a",), max_retries=0), times=2)
        eventually(lambda: len(shop.reached("begin", "a")) == 2, what=crew.output)

        # When they are told to stop, then they have ended soon, and both copies lie in the queue again
        crew.stop(SOON_S)
        assert shop.waiting() == 2
    assert shop.dead() == []


@pytest.mark.parametrize("hung", [False, True], ids=["away", "hung"])
def test_workers_end_while_redis_does_not_answer(hung: bool, shop: Shop, crew: Crew) -> None:
    """I2: they cannot acknowledge what they have done, and it is done once all the same."""
    # Given workers that have just committed a message of each of two queues
    crew.pair_of_kinds(threads=2, heartbeat_ms=QUICK_MS, env={"dramatiq_queue_prefetch": "1"})
    labels = {"a": sell, "b": sell, "c": sell_elsewhere, "d": sell_elsewhere}
    for label, actor in labels.items():
        shop.hold("ack", label)
        shop.send(label, actor=actor)
    eventually(lambda: all(shop.reached("ack", label) for label in labels), what=crew.output)

    # When they are told to stop while Redis is away or hangs
    redis = shop.servers.redis
    with paused(redis.pid) if hung else stopped(redis):
        for label in labels:
            shop.release("ack", label)

        # Then they have soon ended
        crew.stop(SOON_S)

    # And another one finds that the work is done
    crew.start(heartbeat_ms=QUICK_MS)
    eventually(lambda: shop.owed() == 0, what=crew.output)
    assert shop.books() == (4, 4, 4, 4)
    assert [shop.runs(label) for label in labels] == [1, 1, 1, 1]
