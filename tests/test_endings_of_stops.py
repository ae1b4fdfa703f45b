"""How a delivery ends whose worker is told to stop: finished, or given back at once (T23)."""

from __future__ import annotations

from threading import Event, Thread
from time import monotonic, sleep
from typing import TYPE_CHECKING

from .processes import eventually

if TYPE_CHECKING:
    from dramatiq import Worker

    from .stage import Stage

pytest_plugins = ("tests.stage",)


def told_to_stop(worker: Worker) -> Thread:
    """Tell a worker to stop, as a signal does; the thread ends when it has stopped."""
    thread = Thread(target=worker.stop, daemon=True)
    thread.start()
    return thread


def test_what_was_prefetched_is_given_back_at_once_and_what_runs_is_finished_t23(stage: Stage) -> None:
    # Given one thread at work, and messages that wait for it in the worker's memory
    begun, go_on = Event(), Event()

    @stage.actor()
    def write(label: str) -> None:
        stage.effect(label)
        begun.set()
        assert go_on.wait(10)

    running = write.send("running")
    with stage.worker(threads=1) as worker:
        assert begun.wait(10)
        waiting = [write.send(label) for label in ("b", "c", "d")]
        stage.expect_in_redis(in_hand=[running, *waiting])
        payloads = set(stage.raw("in_hand").values())

        # When the worker is told to stop
        stopping = told_to_stop(worker)

        # Then those are back in the queue while the other one still runs, as they were
        stage.expect_in_redis(in_hand=[running], waiting=waiting)
        assert set(stage.raw("waiting").values()) < payloads
        # And that one is finished, and acknowledged
        go_on.set()
        stopping.join(10)
        assert not stopping.is_alive()
        stage.expect_in_redis(waiting=waiting)
    assert stage.effects() == ["running"]
    assert len(stage.key_rows()) == 1


def test_a_delivery_that_waits_for_the_database_is_given_back_i9(stage: Stage) -> None:
    # Given a delivery that waits for an absent database
    @stage.actor(max_retries=0)
    def write(label: str) -> None:
        stage.effect(label)

    stage.hang_up()
    stage.servers.postgres.stop("immediate")
    message = write.send("a")
    sent = stage.raw("waiting")
    with stage.worker() as worker:
        stage.expect_in_redis(in_hand=[message])

        # When the worker is told to stop
        began = monotonic()
        worker.stop()

        # Then it has soon stopped, and the message is in its queue as it was
        assert monotonic() - began < 10
    assert stage.raw("waiting") == sent
    assert stage.places() == {"waiting": [message.message_id]}


def test_a_delivery_that_waits_for_its_key_is_given_back(stage: Stage) -> None:
    # Given a delivery whose key another transaction holds
    @stage.actor(max_retries=0)
    def write(label: str) -> None:
        stage.effect(label)

    message = write.message("a")
    with stage.rival() as rival, stage.worker() as worker:
        rival.execute(
            "INSERT INTO processed_messages VALUES ('write', %s, 'rival', '', 1)", (message.message_id,)
        )
        stage.broker.enqueue(message)
        eventually(lambda: stage.sql("SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock'"))

        # When the worker is told to stop
        worker.stop()

        # Then the message is in its queue as it was
        (waiting,) = stage.messages("waiting")
        assert waiting.args == message.args
        assert "retries" not in waiting.options
        assert stage.places() == {"waiting": [message.message_id]}
    assert stage.stored() == ([], [])


def test_a_body_that_wants_to_hear_of_a_shutdown_is_rolled_back_and_given_back(stage: Stage) -> None:
    # Given a body that is interrupted when its worker stops
    begun = Event()

    @stage.actor(max_retries=0, notify_shutdown=True)
    def write(labels: list[str]) -> None:
        stage.effect(labels.pop())
        begun.set()
        while True:
            sleep(0.01)

    message = write.send(["a"])
    sent = stage.raw("waiting")
    with stage.worker() as worker:
        assert begun.wait(10)

        # When the worker is told to stop
        worker.stop()

    # Then nothing is stored, no retry is spent, and the message is in its queue as it was
    assert stage.raw("waiting") == sent
    assert stage.places() == {"waiting": [message.message_id]}
    assert stage.stored() == ([], [])
    assert [seen.hook for seen in stage.witness.seen] == ["skipped"]


def test_a_worker_that_has_nothing_to_do_stops_and_leaves_no_trace_in_redis(stage: Stage) -> None:
    # Given a worker that has performed its messages
    @stage.actor()
    def write(label: str) -> None:
        stage.effect(label)

    with stage.worker():
        write.send("a")
        eventually(stage.effects)

    # When it has stopped
    # Then what it had to acknowledge is acknowledged, and nobody will look for it
    assert stage.places() == {}
    assert stage.redis.keys("stage:__acks__*") == []
    assert stage.redis.zcard("stage:__heartbeats__") == 0
