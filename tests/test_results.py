"""What an actor returns, where it is kept, and what a redelivery gets and sets off (I5, T10, T22)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
from dramatiq.results import ResultFailure, ResultMissing

from .processes import eventually

if TYPE_CHECKING:
    from collections.abc import Callable

    from .stage import Stage

pytest_plugins = ("tests.stage",)

RESULT = {"receipt": 7, "lines": ["a", None, 1.5], "ü": "\\u0000"}


def test_a_result_is_stored_beside_the_key_and_in_results(stage: Stage) -> None:
    # Given an actor that stores its results
    backend = stage.keep_results()

    @stage.actor(store_results=True)
    def pay() -> dict[str, Any]:
        return RESULT

    # When it is performed
    with stage.worker():
        message = pay.send()
        # Then the result is in both places
        assert message.get_result(backend=backend, block=True) == RESULT
        stage.expect_in_redis()
    assert stage.results() == [RESULT]


def test_none_is_stored_as_null(stage: Stage) -> None:
    # Given an actor that stores results and returns None
    backend = stage.keep_results()

    @stage.actor(store_results=True)
    def pay() -> None:
        stage.effect("paid")

    # When its message is performed, and comes again
    with stage.worker():
        message = pay.send()
        assert message.get_result(backend=backend, block=True) is None
        stage.broker.enqueue(message)
        eventually(lambda: len(stage.seen("returned")) == 2)
        stage.expect_in_redis()

    # Then there is no result beside the key
    assert stage.sql("SELECT result IS NULL FROM processed_messages") == [(True,)]
    assert stage.effects() == ["paid"]


def test_the_result_of_an_actor_that_stores_none_is_not_stored(stage: Stage) -> None:
    # Given an actor that does not store its results, whatever it returns
    stage.keep_results()

    @stage.actor()
    def pay() -> object:
        stage.effect("paid")
        return object()

    # When it is performed
    with stage.worker():
        pay.send()
        eventually(lambda: stage.seen("returned"))
        stage.expect_in_redis()

    # Then it took effect
    assert stage.effects() == ["paid"]
    assert stage.results() == [None]


def test_a_message_may_store_its_result_itself(stage: Stage) -> None:
    # Given an actor that does not store its results, and a message that wants to
    backend = stage.keep_results()

    @stage.actor()
    def pay() -> dict[str, Any]:
        return RESULT

    # When it is performed
    with stage.worker():
        message = pay.send_with_options(store_results=True)
        assert message.get_result(backend=backend, block=True) == RESULT
        stage.expect_in_redis()

    # Then the result stands beside the key
    assert stage.results() == [RESULT]


def test_a_redelivery_gives_the_first_result_again_i5(stage: Stage) -> None:
    # Given a message whose result was lost from Redis, and a body that would return another now
    backend = stage.keep_results()
    receipts = iter(["first", "second"])

    @stage.actor(store_results=True)
    def pay() -> str:
        return next(receipts)

    with stage.worker():
        message = pay.send()
        assert message.get_result(backend=backend, block=True) == "first"
        stage.expect_in_redis()
        stage.redis.delete(backend.build_message_key(message))

        # When the message comes again
        stage.broker.enqueue(message)

        # Then the first result is back
        assert message.get_result(backend=backend, block=True) == "first"
        stage.expect_in_redis()
    assert stage.results() == ["first"]


@pytest.mark.parametrize(
    "result",
    [object(), {1}, math.nan, "a\x00b", "\ud800", b"a"],
    ids=["object", "set", "nan", "nul", "surrogate", "bytes"],
)
def test_a_result_that_cannot_be_stored_is_a_dead_letter_at_once_t13(
    stage: Stage, caplog: pytest.LogCaptureFixture, result: Any
) -> None:
    # Given an actor with such a result
    backend = stage.keep_results()

    @stage.actor(store_results=True)
    def pay() -> Any:
        stage.effect("paid")
        return result

    # When it is performed
    with stage.worker():
        message = pay.send()
        stage.expect_in_redis(dead=[message])

    # Then nothing is stored, no retry is spent, and whoever waits for the result hears of it
    assert stage.stored() == ([], [])
    assert "retries" not in stage.only("dead").options
    assert f"The result of message '{message.message_id}'" in caplog.text
    with pytest.raises(ResultFailure, match="cannot be stored"):
        message.get_result(backend=backend)


def test_a_delivery_that_is_given_back_stores_no_result_t22(stage: Stage) -> None:
    # Given a key that another transaction holds
    backend = stage.keep_results()

    @stage.actor(store_results=True)
    def pay() -> str:
        return "receipt"

    message = pay.send()
    with stage.rival() as rival, stage.worker():
        rival.execute(
            "INSERT INTO processed_messages VALUES ('pay', %s, 'rival', '', 1)", (message.message_id,)
        )

        # When the delivery has been given back
        eventually(lambda: stage.seen("skipped"))

        # Then there is no result yet, not even None
        with pytest.raises(ResultMissing):
            message.get_result(backend=backend)
        # And when the key is free, there is
        rival.connection.rollback()
        assert message.get_result(backend=backend, block=True) == "receipt"
        stage.expect_in_redis()


@pytest.mark.parametrize("position", ["first", "last"])
def test_results_may_stand_anywhere_in_the_stack(stage_with: Callable[..., Stage], position: str) -> None:
    # Given Results before everything else, or behind it
    stage = stage_with()
    backend = stage.keep_results()
    if position == "first":
        stage.broker.middleware.insert(0, stage.broker.middleware.pop())

    @stage.actor(store_results=True)
    def pay() -> str:
        stage.effect("paid")
        return "receipt"

    # When a message is performed, and comes again
    with stage.worker():
        message = pay.send()
        assert message.get_result(backend=backend, block=True) == "receipt"
        stage.broker.enqueue(message)
        eventually(lambda: len(stage.seen("returned")) == 2)
        stage.expect_in_redis()

    # Then it took effect once
    assert stage.effects() == ["paid"]
    assert stage.results() == ["receipt"]
