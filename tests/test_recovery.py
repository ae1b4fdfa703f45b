"""What a worker had in hand comes back when it is dead, and only then; Redis may go and come."""

from __future__ import annotations

from signal import SIGCONT, SIGSTOP
from time import time
from typing import TYPE_CHECKING, Any

import pytest

from .faults.outages import paused, stopped
from .faults.proxy import Proxy
from .faults.signals import signals
from .processes import Kind, WorkerProcess, eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .faults.crew import Crew
    from .faults.shop import Shop

pytest_plugins = ("tests.faults.fixtures",)

#: A queue of its own and no other: nothing but the beats tells Redis that the worker lives.
ONE_QUEUE = ("--queues", "default")
QUICK_MS = 1_000


def start_full(shop: Shop, crew: Crew, **arguments: Any) -> WorkerProcess:
    """A worker of one thread that performs "running", and has "next" in hand and no room."""
    shop.hold("body", "running")
    arguments["env"] = {"dramatiq_queue_prefetch": "2", **arguments.get("env", {})}
    worker = crew.start(threads=1, options=ONE_QUEUE, **arguments)
    shop.send("running")
    eventually(lambda: shop.runs("running"), what=worker.output)
    shop.send("next")
    eventually(lambda: shop.in_hand() and shop.waiting() == 0, what=worker.output)
    assert list(shop.in_hand().values()) == [2]
    return worker


def test_what_killed_workers_had_in_hand_runs_elsewhere_within_8_seconds(shop: Shop, crew: Crew) -> None:
    """T14, with the default heartbeat_timeout: the sweep is on a timer."""
    # Given a worker of threads and one of greenlets, with messages in their bodies and in memory
    doomed = crew.pair_of_kinds(threads=2, env={"dramatiq_queue_prefetch": "5"})
    labels = [f"{number}" for number in range(10)]
    for label in labels:
        shop.hold("body", label)
        shop.send(label)
    eventually(lambda: list(shop.in_hand().values()) == [5, 5], what=crew.output)
    eventually(lambda: sum(shop.runs(label) for label in labels) == 4, what=crew.output)
    crew.start()

    # When both are killed
    for worker in doomed:
        worker.kill()
    for label in labels:
        shop.release("body", label)

    # Then all of the messages are performed by a third
    eventually(lambda: shop.owed() == 0, 8, what=crew.output)
    assert shop.books() == (10, 10, 10, 10)


def test_a_worker_killed_between_its_first_fetch_and_its_first_beat_is_found(shop: Shop, crew: Crew) -> None:
    """T14: the fetch enters it among those who beat."""
    # Given a worker that fetches and has not come to its first beat
    signals.set("hold-boot")
    shop.hold("body", "a")
    for label in ("a", "b", "c"):
        shop.send(label)
    newborn = crew.start(ready=False, heartbeat_ms=QUICK_MS, threads=1)
    eventually(lambda: list(shop.in_hand().values()) == [3], what=crew.output)
    assert "ready for action" not in newborn.output()

    # When it is killed
    newborn.kill()
    signals.clear("hold-boot")
    shop.release("body", "a")
    crew.start(heartbeat_ms=QUICK_MS)

    # Then another worker performs what it had
    eventually(lambda: shop.owed() == 0, what=crew.output)
    assert shop.books() == (3, 3, 3, 3)


@pytest.mark.parametrize(
    "skews_s", [pytest.param((0, 0), id="right clocks"), pytest.param((-30, 30), id="wrong clocks")]
)
def test_a_worker_that_has_nothing_to_ask_of_redis_is_not_taken_for_dead(
    skews_s: tuple[int, int], shop: Shop, crew: Crew
) -> None:
    """T14: it beats on a timer, and the time of a beat is Redis's."""
    # Given a worker that is busy and full, and one that would sweep up after it
    module = "tests.faults.skewed_actors:broker"
    busy, idle = ({"CLOCK_SKEW_S": str(skew_s)} for skew_s in skews_s)
    start_full(shop, crew, heartbeat_ms=QUICK_MS, module=module, env=busy)
    crew.start(heartbeat_ms=QUICK_MS, module=module, env=idle)

    # When both have been alive for several timeouts
    eventually(lambda: len(shop.beats()) == 2, what=crew.output)
    begun = shop.beats()
    eventually(
        lambda: all(ms - begun[worker] > 3 * QUICK_MS for worker, ms in shop.beats().items()),
        what=crew.output,
    )

    # Then the first still has what it had, and performs it once
    assert [count for count in shop.in_hand().values() if count] == [2]
    shop.release("body", "running")
    eventually(lambda: shop.owed() == 0, what=crew.output)
    assert len(shop.reached("begin", "running")) == len(shop.reached("begin", "next")) == 1


def test_after_redis_has_hung_for_longer_than_the_timeout_nobody_is_swept_at_once(
    shop: Shop, crew: Crew
) -> None:
    """T14: then everybody looks silent to whoever beats first."""
    # Given a worker that is busy and full, and one that has been alive for a whole timeout
    busy = start_full(shop, crew, heartbeat_ms=QUICK_MS)
    (busy_id,) = shop.beats()
    crew.start(heartbeat_ms=QUICK_MS)
    eventually(lambda: len(shop.beats()) == 2, what=crew.output)
    begun = shop.beats()
    eventually(
        lambda: all(ms - begun[worker] > 1.2 * QUICK_MS for worker, ms in shop.beats().items()),
        what=crew.output,
    )

    # When Redis hangs for longer than the timeout, and the idle one is the first to beat again
    busy.signal(SIGSTOP)
    with paused(shop.servers.redis.pid):
        over_s = time() + 1.5 * QUICK_MS / 1_000
        eventually(lambda: time() > over_s)
    eventually(lambda: max(shop.beats().values()) > over_s * 1_000, what=crew.output)
    busy.signal(SIGCONT)

    # Then the other one beats again too, and nothing was handed out
    eventually(lambda: shop.beats().get(busy_id, 0) > over_s * 1_000, what=crew.output)
    assert shop.in_hand().get(busy_id) == 2
    shop.release("body", "running")
    eventually(lambda: shop.owed() == 0, what=crew.output)
    assert len(shop.reached("begin", "running")) == len(shop.reached("begin", "next")) == 1


@pytest.fixture
def proxy(shop: Shop) -> Iterator[Proxy]:
    """A proxy in front of Redis."""
    with Proxy(shop.servers.redis.url) as proxy:
        yield proxy


@pytest.mark.parametrize("kind", ["threads", "gevent"])
def test_a_message_whose_fetch_was_answered_to_nobody_comes_back(
    kind: Kind, shop: Shop, crew: Crew, proxy: Proxy
) -> None:
    """T31, T32: its id is in the hand of a living worker, where no sweep looks for it."""
    # Given a worker behind a proxy that will lose the answer to a fetch
    worker = crew.start(kind=kind, env={"REDIS_URL": proxy.url})
    proxy.lose_answer_with(b"lost-label")

    # When a message is fetched
    shop.send("lost-label")

    # Then it is performed by the same worker, and acknowledged
    eventually(lambda: shop.owed() == 0, what=worker.output)
    assert proxy.lost.is_set()
    assert shop.books() == (1, 1, 1, 1)


def test_an_acknowledgement_that_was_answered_to_nobody_is_repeated(
    shop: Shop, crew: Crew, proxy: Proxy
) -> None:
    """T32: the notes outlive a failed call."""
    # Given a message that was performed and is not yet acknowledged
    worker = crew.start(env={"REDIS_URL": proxy.url}, options=ONE_QUEUE)
    shop.hold("ack", "a")
    shop.send("a")
    eventually(lambda: shop.reached("ack", "a"), what=worker.output)

    # When answers get lost while it is acknowledged
    shop.release("ack", "a")
    for _ in range(3):
        proxy.lose_answer_with(b"*2\r\n")
        eventually(proxy.lost.is_set, what=worker.output)

    # Then it was acknowledged all the same, and not performed again
    eventually(lambda: shop.owed() == 0, what=worker.output)
    eventually(lambda: not any(shop.in_hand().values()), what=worker.output)
    assert shop.books() == (1, 1, 1, 1)
    assert shop.runs("a") == 1


@pytest.mark.parametrize("kind", ["threads", "gevent"])
def test_an_actor_that_fails_while_redis_is_away_comes_again(kind: Kind, shop: Shop, crew: Crew) -> None:
    """I9, T9: its retry cannot be stored, so the message is not acknowledged."""
    # Given a body that runs
    worker = crew.start(kind=kind)
    shop.hold("body", "a")
    shop.send("a")
    eventually(lambda: shop.runs("a"), what=worker.output)

    # When it fails while Redis is away
    signals.set("fail-a")
    with stopped(shop.servers.redis):
        shop.release("body", "a")
        eventually(lambda: shop.reached("ack", "a"), what=worker.output)

    # Then the message is performed again as soon as Redis is back, by the same worker
    eventually(lambda: shop.owed() == 0, what=worker.output)
    assert shop.books() == (1, 1, 1, 1)
    assert shop.runs("a") == 2

    # And the worker goes on
    shop.send("b")
    eventually(lambda: shop.orders("b") == 1, what=worker.output)


def test_an_actor_that_returns_while_redis_is_away_is_acknowledged_later(shop: Shop, crew: Crew) -> None:
    """I2, I9: the acknowledgement may be late, and one delivery is enough."""
    # Given a body that runs
    worker = crew.start()
    shop.hold("body", "a")
    shop.send("a", max_retries=0)
    eventually(lambda: shop.runs("a"), what=worker.output)

    # When it returns while Redis is away
    with stopped(shop.servers.redis):
        shop.release("body", "a")
        eventually(lambda: shop.orders("a") == 1, what=worker.output)

    # Then its message is acknowledged
    eventually(lambda: shop.owed() == 0, what=worker.output)
    assert len(shop.reached("begin", "a")) == 1


def test_a_delayed_message_that_falls_due_while_redis_is_away_is_performed_later(
    shop: Shop, crew: Crew
) -> None:
    """T31: the stock thread drops what it holds, and its ids stay in our own hand."""
    # Given a delayed message in the memory of a worker
    worker = crew.start()
    message = shop.send("a", delay=1_000)
    eventually(lambda: any(shop.in_hand("default.DQ").values()), what=worker.output)

    # When it falls due while Redis is away
    with stopped(shop.servers.redis):
        eventually(lambda: time() * 1_000 > message.message_timestamp + 1_500)

    # Then it is performed once Redis is back, by the same worker
    eventually(lambda: shop.owed() == 0, what=worker.output)
    assert shop.books() == (1, 1, 1, 1)
