"""Whatever a delivery did, its thread takes the next message with a clean connection (I8)."""

from __future__ import annotations

from time import sleep
from typing import TYPE_CHECKING, Any

from dramatiq.middleware import Middleware, TimeLimitExceeded

from .processes import eventually

if TYPE_CHECKING:
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
    assert [consumer for consumer, _ in stage.keys()] == ["write"]


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
        eventually(lambda: stage.effects())
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
