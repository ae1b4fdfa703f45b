"""Whatever a delivery did, its thread takes the next message with a clean connection (I8)."""

from __future__ import annotations

from time import sleep
from typing import TYPE_CHECKING, Any

from dramatiq.middleware import Middleware, TimeLimitExceeded

from .processes import eventually

if TYPE_CHECKING:
    import pytest

    from .stage import Stage

pytest_plugins = ("tests.stage",)


def test_a_time_limit_is_an_exception_and_the_thread_goes_on_clean_i8_t4(stage: Stage) -> None:
    # Given an actor that never ends, and one thread
    @stage.actor(time_limit=100)
    def dawdle() -> None:
        stage.effect("dawdle")
        while True:
            sleep(0.01)

    @stage.actor()
    def write(label: str) -> None:
        stage.effect(label)

    # When both are performed, the other one last
    with stage.worker(threads=1, time_limits=True):
        message = dawdle.send()
        stage.expect_in_redis(delayed=[message])
        write.send("a")
        stage.expect_in_redis(delayed=[message])
        eventually(lambda: stage.effects() == ["a"])

    # Then one retry was spent, and the thread's next message took nothing along
    assert stage.only("delayed").options["retries"] == 1
    assert [type(seen.outcome) for seen in stage.seen("raised")] == [TimeLimitExceeded]
    assert [consumer for consumer, _ in stage.key_rows()] == ["write"]


def test_what_an_interrupt_left_on_the_connection_is_not_committed_with_the_next_message_t4(
    stage: Stage,
) -> None:
    # Given a thread whose connection is left in a transaction that peewee knows nothing of
    class Interrupted(Middleware):
        def before_process_message(self, broker: Any, message: Any) -> None:
            cursor = stage.database.connection().cursor()
            cursor.execute("BEGIN; INSERT INTO effects VALUES ('leftover')")

    stage.broker.add_middleware(Interrupted())

    @stage.actor()
    def write(label: str) -> None:
        stage.effect(label)

    # When the thread performs its next message
    with stage.worker():
        write.send("a")
        eventually(stage.effects)
        stage.expect_in_redis()

    # Then the leftovers are gone
    assert stage.effects() == ["a"]


def test_callbacks_of_a_failed_attempt_do_not_run_with_the_next_message_i8_t26(stage: Stage) -> None:
    # Given one thread, and a failed attempt that had registered a callback
    called: list[str] = []

    @stage.actor()
    def write(label: str) -> None:
        stage.effect(label)
        stage.database.after_commit(lambda: called.append(label))
        if label == "fails":
            raise ValueError("no")

    with stage.worker(threads=1):
        failed = write.send("fails")
        stage.expect_in_redis(delayed=[failed])
        # When the thread commits its next message
        write.send("a")
        stage.expect_in_redis(delayed=[failed])

    # Then only that one's callback has run
    assert called == ["a"]


def test_a_callback_after_the_commit_that_raises_does_not_undo_it_t26(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    # Given an actor with such a callback
    def call_back() -> None:
        raise ValueError("the callback failed")

    @stage.actor()
    def write(label: str) -> None:
        stage.effect(label)
        stage.database.after_commit(call_back)

    # When it is performed
    with stage.worker():
        write.send("a")
        stage.expect_in_redis()

    # Then it is done, and the log tells of the callback
    assert stage.effects() == ["a"]
    assert len(stage.key_rows()) == 1
    assert "the callback failed" in caplog.text


def test_a_transaction_that_the_body_left_open_does_not_outlive_the_delivery_i8(stage: Stage) -> None:
    # Given a body that begins a nested transaction and never ends it, and a hook behind it
    open_afterwards: list[bool] = []

    class Looker(Middleware):
        def after_process_message(
            self, broker: Any, message: Any, *, result: Any = None, exception: Any = None
        ) -> None:
            open_afterwards.append(stage.database.in_transaction())

    stage.broker.add_middleware(Looker())

    @stage.actor()
    def write(label: str) -> None:
        stage.database.session_start()
        stage.effect(label)

    # When two such messages are performed by one thread
    with stage.worker(threads=1):
        for label in ("a", "b"):
            write.send(label)
        eventually(lambda: len(open_afterwards) == 2)
        stage.expect_in_redis()

    # Then both took effect, and the hook is outside any transaction
    assert stage.effects() == ["a", "b"]
    assert open_afterwards == [False, False]
