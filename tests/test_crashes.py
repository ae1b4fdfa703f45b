"""Many deliveries at once, with and without servers that crash beneath them: the sums are exact."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import pytest

from .processes import Kind, eventually

if TYPE_CHECKING:
    from .faults.crew import Crew
    from .faults.shop import Shop

pytest_plugins = ("tests.faults.fixtures",)

A_LONG_WAIT_S = 40


def test_300_messages_delivered_three_times_each_to_two_processes_take_effect_once(
    shop: Shop, crew: Crew
) -> None:
    """I1, with a process of threads and one of greenlets on the same queue."""
    # Given 300 messages, each of them in the queue three times, in all orders
    messages = [shop.send(f"{number}") for number in range(300)]
    for message in (*messages, *reversed(messages)):
        shop.deliver(message)

    # When two processes perform them
    crew.pair_of_kinds()
    eventually(lambda: shop.owed() == 0, A_LONG_WAIT_S, what=crew.output)

    # Then each message has one effect, and every other delivery was answered as a duplicate
    assert shop.books() == (300, 300, 300, 300)
    assert crew.said("Duplicate answered") >= 600
    assert shop.dead() == []


@pytest.mark.parametrize("kind", ["threads", "gevent"])
def test_of_20_copies_of_one_message_one_takes_effect_and_19_are_duplicates(
    kind: Kind, shop: Shop, crew: Crew
) -> None:
    """I1, T11: copies that meet in one process, and in two."""
    # Given a message that will be delivered 20 times
    shop.deliver(shop.send("a"), times=19)

    # When two processes perform them
    crew.start(kind=kind, processes=2)

    # Then one has had an effect
    eventually(lambda: shop.owed() == 0, A_LONG_WAIT_S, what=crew.output)
    assert shop.books() == (1, 1, 1, 1)
    assert shop.runs("a") == 1
    assert crew.said("Duplicate answered") >= 19


def test_a_greenlet_that_waits_for_a_key_does_not_stop_the_others(shop: Shop, crew: Crew) -> None:
    """T7: with a lock_timeout the missing wait callback shows as a stall of the whole process."""
    # Given a gevent worker in which one greenlet waits for the key that another one holds
    crew.start(kind="gevent", env={"LOCK_TIMEOUT_MS": "50000"})
    shop.hold("body", "a")
    shop.deliver(shop.send("a"))
    eventually(shop.waits_for_a_lock, what=crew.output)

    # When another message arrives
    shop.send("b")

    # Then it is performed at once, and the first can go on
    eventually(lambda: shop.orders("b") == 1, what=crew.output)
    shop.release("body", "a")
    eventually(lambda: shop.owed() == 0, what=crew.output)
    assert shop.orders("a") == 1


def test_two_crashes_of_postgresql_under_load_cost_time_and_nothing_else(shop: Shop, crew: Crew) -> None:
    """I1, I9: sums exact, no dead letter, no retry spent even by messages that have none."""
    crew.pair_of_kinds()
    labels = [f"{number}" for number in range(300)]
    for half in (labels[:150], labels[150:]):
        # Given load, with bodies that are open when the server crashes
        caught = half[20:120:50]
        for label in caught:
            shop.hold("body", label)
        for label in half:
            shop.send(label, max_retries=0)
        for label in caught:
            eventually(partial(shop.runs, label), what=crew.output)

        # When it crashes and is started again
        shop.servers.postgres.restart("immediate")
        for label in caught:
            shop.release("body", label)

    # Then every message has one effect
    eventually(lambda: shop.owed() == 0, A_LONG_WAIT_S, what=crew.output)
    assert shop.dead() == [], crew.output()
    assert shop.books() == (300, 300, 300, 300)
    assert {number for label in labels for number in shop.retries(label)} == {0}
    assert sum(shop.runs(label) > 1 for label in labels) >= 4
