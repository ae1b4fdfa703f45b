"""Actors that run without a key: called as functions, or opted out."""

from __future__ import annotations

from threading import Event
from typing import TYPE_CHECKING, Any

import pytest
from dramatiq.middleware import Middleware

from middleware.errors import NoDelivery

from .processes import eventually

if TYPE_CHECKING:
    from .stage import Stage

pytest_plugins = ("tests.stage",)


def test_an_actor_that_a_hook_calls_without_a_delivery_is_not_run_t1(stage: Stage) -> None:
    # Given a hook that calls an actor in a worker thread when the delivery is over
    errors: list[Exception] = []
    called = Event()

    @stage.actor()
    def write(label: str) -> None:
        stage.effect(label)

    class Caller(Middleware):
        def after_ack(self, broker: Any, message: Any) -> None:
            try:
                write("b")
            except NoDelivery as error:
                errors.append(error)
            called.set()

    stage.broker.add_middleware(Caller())

    # When a delivery ends
    with stage.worker():
        write.send("a")
        assert called.wait(10)
        stage.expect_in_redis()

    # Then the call was refused, and wrote nothing
    assert len(errors) == 1
    assert stage.effects() == ["a"]


def test_an_actor_called_by_ordinary_code_runs_in_a_transaction_without_a_key(stage: Stage) -> None:
    # Given an actor that fails half-way
    @stage.actor()
    def write(label: str, *, fails: bool = False) -> None:
        stage.effect(label)
        if fails:
            raise ValueError("no")

    # When it is called as a function outside a worker
    write("a")
    with pytest.raises(ValueError, match="no"):
        write("b", fails=True)

    # Then each call took effect as a whole, or not at all, and left no key
    assert stage.effects() == ["a"]
    assert stage.key_rows() == []


def test_an_actor_that_opted_out_has_neither_transaction_nor_key(stage: Stage) -> None:
    # Given actors that opted out
    states: list[bool] = []

    @stage.actor(idempotency="off")
    def write(label: str) -> None:
        states.append(stage.database.in_transaction())
        stage.effect(label)

    @stage.actor(idempotency="off")
    def fail(label: str) -> None:
        stage.effect(label)
        raise ValueError("no")

    # When they are performed, one of them twice
    with stage.worker():
        message, failed = write.send("a"), fail.send("b")
        stage.expect_in_redis(delayed=[failed])
        stage.broker.enqueue(message)
        eventually(lambda: len(stage.seen("returned")) == 2)
        stage.expect_in_redis(delayed=[failed])

    # Then it is as with Dramatiq alone
    assert states == [False, False]
    assert stage.effects() == ["a", "a", "b"]
    assert stage.only("delayed").options["retries"] == 1
    assert stage.key_rows() == []
