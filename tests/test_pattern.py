"""The three proofs of the pattern, on real servers and real worker processes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from .faults.signals import signals
from .processes import Kind, eventually

if TYPE_CHECKING:
    from .faults.crew import Crew
    from .faults.shop import Shop

pytest_plugins = ("tests.faults.fixtures",)

both_kinds = pytest.mark.parametrize("kind", ["threads", "gevent"])

#: A rival waits for the key longer than any pause of this machine.
PATIENT = {"LOCK_TIMEOUT_MS": "20000"}
#: A killed worker's messages come back soon.
QUICK_MS = 1_000
#: Each worker takes one message and leaves the other to its rival.
ONE_EACH = {"dramatiq_queue_prefetch": "1"}


@both_kinds
def test_two_processors_on_one_message_at_the_same_moment_change_the_database_once(
    kind: Kind, shop: Shop, crew: Crew
) -> None:
    """I1: one key, one effect, and T11: the second processor waits on the key of the first."""
    # Given two processes that both have the message and are about to begin
    shop.hold("begin", "a")
    shop.hold("body", "a")
    crew.pair(kind=kind, threads=1, env=ONE_EACH | PATIENT)
    shop.deliver(shop.send("a"))
    eventually(lambda: len(shop.reached("begin", "a")) == 2)
    assert len({process for process, *_ in shop.reached("begin", "a")}) == 2

    # When they begin at the same moment, and are both in its transaction
    shop.release("begin", "a")
    eventually(lambda: shop.runs("a") == 1 and shop.waits_for_a_lock(), what=crew.output)
    assert shop.keys() == 0
    shop.release("body", "a")

    # Then one has changed the database, and the other has found that out
    eventually(lambda: shop.owed() == 0, what=crew.output)
    assert shop.books() == (1, 1, 1, 1)
    assert shop.runs("a") == 1
    assert crew.said("Duplicate answered") == 1


@both_kinds
def test_the_processor_that_waits_does_the_work_if_the_first_is_rolled_back(
    kind: Kind, shop: Shop, crew: Crew
) -> None:
    """I1, T11: a key that was rolled back is free for whoever waits for it."""
    # Given two processors on one message, of which the first will fail
    shop.hold("body", "a")
    signals.set("fail-a")
    crew.pair(kind=kind, threads=1, env=ONE_EACH | PATIENT)
    shop.deliver(shop.send("a"))
    eventually(lambda: shop.runs("a") == 1 and shop.waits_for_a_lock(), what=crew.output)

    # When the first fails
    shop.release("body", "a")

    # Then the second has done the work, and the retry of the first is a duplicate
    eventually(lambda: shop.owed() == 0, what=crew.output)
    assert shop.books() == (1, 1, 1, 1)
    assert shop.runs("a") == 2
    assert sorted(shop.retries("a")) == [0, 0, 1]


@both_kinds
def test_a_kill_before_the_commit_leaves_nothing_and_the_redelivery_does_the_work(
    kind: Kind, shop: Shop, crew: Crew
) -> None:
    """I1, I2: a stop before the commit undoes key and change, and the message comes again."""
    # Given two workers, one of which has made its changes and not committed them
    crew.pair(kind=kind, heartbeat_ms=QUICK_MS)
    shop.hold("end", "a")
    shop.send("a", max_retries=0)
    eventually(lambda: shop.reached("end", "a"), what=crew.output)

    # When it is killed there
    shop.hold("begin", "a")
    signals.set("kill-end-a")
    shop.release("end", "a")

    # Then the message comes to the other, which finds no trace of the first
    eventually(lambda: len(shop.reached("begin", "a")) == 2, what=crew.output)
    assert shop.books() == (0, 0, 0, 0)

    # And it does the work
    shop.release("begin", "a")
    eventually(lambda: shop.owed() == 0, what=crew.output)
    assert shop.books() == (1, 1, 1, 1)
    (first, *_), (second, *_) = shop.reached("body", "a")
    assert first != second
    assert shop.retries("a") == [0, 0]


@both_kinds
@pytest.mark.parametrize("point", ["processed", "ack"])
def test_a_kill_between_commit_and_acknowledgement_lets_the_redelivery_change_nothing(
    kind: Kind, point: str, shop: Shop, crew: Crew
) -> None:
    """I1, I2: the redelivery of what is committed meets its key."""
    # Given two workers, one of which has committed and not acknowledged
    crew.pair(kind=kind, heartbeat_ms=QUICK_MS)
    shop.hold(point, "a")
    shop.send("a")
    eventually(lambda: shop.reached(point, "a"), what=crew.output)
    assert shop.books() == (1, 1, 1, 1)
    assert shop.owed() == 1

    # When it is killed there
    signals.set(f"kill-{point}-a")
    shop.release(point, "a")

    # Then the message comes to the other, which answers it without running the body
    eventually(lambda: shop.owed() == 0, what=crew.output)
    assert len({process for process, *_ in shop.reached("begin", "a")}) == 2
    assert shop.books() == (1, 1, 1, 1)
    assert shop.runs("a") == 1
    assert crew.said("Duplicate answered") == 1
