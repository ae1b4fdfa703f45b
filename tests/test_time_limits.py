"""A time limit ends a body and nothing else (T4, T20)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .faults.actors import sell_at_the_limit
from .faults.signals import signals
from .processes import eventually

if TYPE_CHECKING:
    from .faults.crew import Crew
    from .faults.shop import Shop
    from .processes import WorkerProcess

pytest_plugins = ("tests.faults.fixtures",)


def test_a_time_limit_in_the_body_rolls_back_and_the_retry_does_the_work(
    shop: Shop, lone_worker: WorkerProcess
) -> None:
    """I8, T4: an interrupt spends a retry and leaves no open transaction behind."""
    # Given a body that has written an order and then runs into its time limit
    shop.hold("body", "a")
    shop.send("a", time_limit=200)

    # When it was interrupted
    eventually(lambda: shop.owed() == 0, what=lone_worker.output)

    # Then the retry has taken effect, and nothing else
    assert shop.books() == (1, 1, 1, 1)
    assert shop.runs("a") == 2
    assert shop.retries("a") == [0, 1]
    shop.expect_goes_on(lone_worker)


def test_a_time_limit_that_has_passed_does_not_reach_the_hooks_after_the_body(shop: Shop, crew: Crew) -> None:
    """T20: if it did, the retry would be lost and the thread would die."""
    # Given a body that fails within its time limit, and a hook that takes longer
    worker = crew.start(threads=2)
    signals.set("fail-a")
    shop.hold("processed", "a")
    shop.send("a", time_limit=300)
    eventually(lambda: shop.reached("processed", "a"), what=worker.output)

    # When that limit is over, as another message shows that began later and runs into its own
    shop.hold("body", "b")
    shop.send("b", time_limit=300)
    eventually(lambda: shop.retries("b") == [0, 1], what=worker.output)
    shop.release("processed", "a")

    # Then the retry was stored, and both threads live
    eventually(lambda: shop.retries("a") == [0, 1], what=worker.output)
    eventually(lambda: shop.owed() == 0, what=worker.output)
    for label in ("c", "d"):
        shop.hold("body", label)
        shop.send(label)
    eventually(lambda: shop.runs("c") == shop.runs("d") == 1, what=worker.output)


def test_a_time_limit_that_fires_as_the_body_ends_is_waited_for_and_handled(shop: Shop, crew: Crew) -> None:
    """T20: TimeLimit clears the deadline first and raises after that."""
    # Given a worker of one thread
    worker = crew.start(threads=1)

    # When a body ends in that moment
    signals.set("late-a")
    shop.send("a", actor=sell_at_the_limit)
    eventually(lambda: shop.owed() == 0, what=worker.output)

    # Then the delivery has failed, its retry was stored and performed by the same thread
    assert shop.books() == (1, 1, 1, 1)
    assert shop.retries("a") == [0, 1]
    assert len({thread for _, thread, *_ in shop.reached("body", "a")}) == 1
    shop.expect_goes_on(worker)
