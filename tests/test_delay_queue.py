"""Without a ledger delays wait in Dramatiq's delay queue, in the memory of its own thread."""

from __future__ import annotations

from time import time
from typing import TYPE_CHECKING

import pytest
from dramatiq.brokers.redis import RedisBroker
from dramatiq.results import Results
from dramatiq.results.backends import RedisBackend

from .processes import eventually

if TYPE_CHECKING:
    from .stage import Stage

pytest_plugins = ("tests.stage",)


@pytest.fixture
def stock_broker(stage: Stage) -> RedisBroker:
    """Dramatiq's own broker on the same Redis and namespace."""
    return RedisBroker(client=stage.broker.client, namespace=stage.broker.namespace)


def test_a_message_with_an_eta_in_a_plain_queue_is_performed_once(stage: Stage) -> None:
    # Given a message that is due, in the queue itself
    @stage.actor()
    def write(label: str) -> None:
        stage.effect(label)

    stage.broker.enqueue(write.message_with_options(args=("a",), eta=int(time() * 1_000) - 1_000))

    # When Dramatiq's thread moves it on
    with stage.worker():
        eventually(lambda: stage.effects() == ["a"])
        # Then what it has moved is settled, and nothing comes again
        stage.expect_in_redis()
    assert len(stage.seen("returned")) == 1


def test_a_delayed_message_with_an_invalid_key_is_dead_and_the_next_one_passes_t13_t21(
    stage: Stage, stock_broker: RedisBroker
) -> None:
    # Given two delayed messages of a sender without our middleware, the first with an empty key
    @stage.actor()
    def write(label: str) -> None:
        stage.effect(label)

    bad = write.message_with_options(args=("bad",), idempotency_key="")
    stock_broker.enqueue(bad, delay=50)
    stock_broker.enqueue(write.message("good"), delay=100)

    # When their time comes
    with stage.worker():
        # Then the good one takes effect, and the bad one is a dead letter
        eventually(lambda: stage.effects() == ["good"])
        stage.expect_in_redis(dead=[bad])


def test_a_results_that_the_application_appended_beside_another_counts_too_i5(stage: Stage) -> None:
    # Given a Results that stores what actors ask for, and a later one that stores all
    backend = RedisBackend(client=stage.broker.client, namespace=f"{stage.broker.namespace}:own")
    stage.keep_results()
    stage.broker.add_middleware(Results(backend=backend, store_results=True))

    @stage.actor()
    def add(left: int, right: int) -> int:
        return left + right

    # When a message is delivered twice
    message = add.message(2, 3)
    with stage.worker():
        stage.broker.enqueue(message)
        eventually(lambda: len(stage.seen("returned")) == 1)
        stage.broker.enqueue(message)
        eventually(lambda: len(stage.seen("returned")) == 2)

    # Then its result is the first one's
    assert message.get_result(backend=backend) == 5
    assert stage.results() == [5]
