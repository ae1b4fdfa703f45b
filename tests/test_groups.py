"""Groups: members and barrier leave together, and the completion comes once, after the last (T10, T25)."""

from __future__ import annotations

from contextlib import nullcontext
from threading import Barrier as Meeting
from threading import Thread
from typing import TYPE_CHECKING, Any

import pytest
from dramatiq import group, pipeline

from middleware.errors import MessageTooLarge, WaitInsideTransaction

from .processes import eventually

if TYPE_CHECKING:
    from collections.abc import Callable

    from dramatiq import Actor

    from .ledger_stage import LedgerStage

pytest_plugins = ("tests.stage", "tests.ledger_stage")


@pytest.fixture
def write(ledger: LedgerStage) -> Actor[..., Any]:
    """An actor whose effect is a label, and another one, `done`, for completions."""
    return declare(ledger)


def declare(ledger: LedgerStage) -> Actor[..., Any]:
    ledger.keep_results()

    @ledger.actor()
    def done() -> None:
        ledger.effect("done")

    @ledger.actor(store_results=True)
    def write(label: str, *_before: Any) -> str:
        ledger.effect(label)
        return label

    return write


def group_of(ledger: LedgerStage, members: list[Any]) -> group:
    found = group(members, broker=ledger.broker)
    found.add_completion_callback(ledger.broker.get_actor("done").message())
    return found


def barriers(ledger: LedgerStage) -> tuple[list[int], int]:
    """How many members each barrier waits for, and how many rows of members there are."""
    waiting = ledger.sql("SELECT waiting FROM barriers ORDER BY 1")
    ((members,),) = ledger.sql("SELECT count(*) FROM barrier_members")
    return [count for (count,) in waiting], members


def test_the_completion_comes_once_and_after_the_last_member_t10_t25(
    ledger: LedgerStage, write: Actor[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a group of messages and pipelines, with results
    monkeypatch.setattr("dramatiq.broker.global_broker", ledger.broker)  # `completed` asks this one
    members: list[Any] = [write.message(f"a{number}") for number in range(10)]
    members += [
        pipeline([write.message(f"b{number}"), write.message(f"c{number}")], broker=ledger.broker)
        for number in range(5)
    ]
    whole = group_of(ledger, members)

    # When it is run, and each of its members comes three times
    with ledger.worker_and_relay(threads=4):
        whole.run()
        for row in ledger.rows():
            for _ in range(2):
                ledger.broker.enqueue(row.message)
        whole.wait(timeout=15_000)
        eventually(lambda: "done" in ledger.effects())
        ledger.expect_settled()

        # Then each step was done once, and the completion once
        labels = [f"a{n}" for n in range(10)] + [f"b{n}" for n in range(5)] + [f"c{n}" for n in range(5)]
        assert ledger.effects() == [*labels, "done"]
        assert whole.completed
        assert list(whole.get_results()) == [f"a{n}" for n in range(10)] + [f"c{n}" for n in range(5)]

    # And its transaction began after all others had ended
    ((consumer,),) = ledger.sql(
        "SELECT consumer_name FROM processed_messages ORDER BY processed_at DESC LIMIT 1"
    )
    assert consumer == "done"
    assert barriers(ledger) == ([0], 0)


@pytest.mark.parametrize("isolation", ["read committed", "repeatable read", "serializable"])
def test_last_members_that_end_at_the_same_moment_complete_their_group_once_t25(
    ledger_with: Callable[..., LedgerStage], isolation: str
) -> None:
    # Given members that all have done their work before any of them commits
    ledger = ledger_with(session={"default_transaction_isolation": isolation.replace(" ", "\\ ")})
    declare(ledger)
    meeting = Meeting(4)
    met: list[int] = []

    @ledger.actor()
    def together(label: str) -> None:
        ledger.effect(label)
        if not met:  # who is run again after a conflict meets nobody
            meeting.wait(10)
            met.append(1)

    # When they are performed at once
    with ledger.worker_and_relay(threads=4):
        group_of(ledger, [together.message(label) for label in "abcd"]).run()
        eventually(lambda: "done" in ledger.effects(), 20)
        ledger.expect_settled()

    # Then their group is complete once
    assert ledger.effects() == ["a", "b", "c", "d", "done"]
    assert barriers(ledger) == ([0], 0)


def test_a_group_in_a_transaction_that_is_rolled_back_leaves_nothing_t25(
    ledger: LedgerStage, write: Actor[..., Any]
) -> None:
    with ledger.database.atomic() as transaction:
        group_of(ledger, [write.message("a"), write.message("b")]).run()
        transaction.rollback()
    assert barriers(ledger) == ([], 0)
    assert ledger.rows() == []


@pytest.mark.parametrize("inside", [True, False])
def test_members_and_barrier_leave_together_or_not_at_all_t25(
    ledger: LedgerStage, write: Actor[..., Any], inside: bool
) -> None:
    # Given a group whose third member is too large
    members = [write.message(label) for label in ("a", "b", "c" * (1 << 20), "d")]
    whole = group_of(ledger, members)

    # When it is run, and its sender goes on although it was refused
    with ledger.database.atomic() if inside else nullcontext(), pytest.raises(MessageTooLarge):
        whole.run()

    # Then nothing of it has left
    assert barriers(ledger) == ([], 0)
    assert ledger.rows() == []
    assert ledger.in_redis() == []

    # And the next group is not held back by it
    group_of(ledger, [write.message("e"), write.message("f")]).run()
    assert barriers(ledger) == ([2], 2)
    assert len(ledger.rows()) == 2


def test_a_group_that_is_run_twice_completes_once(ledger: LedgerStage, write: Actor[..., Any]) -> None:
    # Given a group
    whole = group_of(ledger, [write.message("a"), write.message("b")])

    # When it is run by two threads at once, and again when it is complete
    with ledger.worker_and_relay():
        threads = [Thread(target=lambda: (whole.run(), ledger.database.close())) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        eventually(lambda: "done" in ledger.effects())
        ledger.expect_settled()
        whole.run()
        ledger.expect_settled()

    # Then it has completed once
    assert ledger.effects() == ["a", "b", "done"]
    assert barriers(ledger) == ([0], 0)


def test_a_group_that_got_stuck_completes_when_it_is_run_again(
    ledger: LedgerStage, write: Actor[..., Any]
) -> None:
    # Given a group one of whose members failed for good
    fails = [True]

    @ledger.actor(throws=ValueError)
    def stumble() -> None:
        if fails:
            raise ValueError("no")
        ledger.effect("stumbled")

    whole = group_of(ledger, [write.message("a"), stumble.message()])
    with ledger.worker_and_relay():
        whole.run()
        eventually(ledger.letters)
        ledger.expect_settled()
        assert ledger.effects() == ["a"]

        # When its cause is mended and the group is run again
        fails.clear()
        whole.run()
        ledger.expect_settled()

    # Then it completes
    assert ledger.effects() == ["a", "done", "stumbled"]


def test_a_member_that_was_answered_by_business_key_counts_in_its_own_group_i5(
    ledger: LedgerStage, write: Actor[..., Any]
) -> None:
    # Given two groups with a member of the same business key in each
    with ledger.worker_and_relay():
        for other in ("a", "b"):
            same = write.message_with_options(args=("same",), idempotency_key="same")
            group_of(ledger, [same, write.message(other)]).run()

        # When both have been run
        eventually(lambda: ledger.effects().count("done") == 2)
        ledger.expect_settled()

    # Then both are complete, and the work was done once
    assert ledger.effects() == ["a", "b", "done", "done", "same"]


def test_a_member_without_a_transaction_is_counted_with_its_end(
    ledger: LedgerStage, write: Actor[..., Any]
) -> None:
    # Given a member with idempotency="off"
    @ledger.actor(idempotency="off")
    def ask() -> None: ...

    # When its group is run
    with ledger.worker_and_relay():
        group_of(ledger, [ask.message(), write.message("a")]).run()
        eventually(lambda: "done" in ledger.effects())
        ledger.expect_settled()

    # Then it is complete
    assert ledger.effects() == ["a", "done"]


def test_a_group_survives_that_redis_is_emptied_i7(ledger: LedgerStage, write: Actor[..., Any]) -> None:
    # Given a group in Redis that nobody has begun
    whole = group_of(ledger, [write.message("a"), write.message("b")])
    with ledger.relay():
        whole.run()
        eventually(lambda: len(ledger.in_redis()) == 2)

        # When Redis loses everything
        ledger.redis.flushall()

        # Then the group completes all the same
        with ledger.worker():
            eventually(lambda: "done" in ledger.effects(), 20)
            ledger.expect_settled()
    assert ledger.effects() == ["a", "b", "done"]


def test_a_wait_for_a_group_in_the_transaction_that_runs_it_raises_at_once(
    ledger: LedgerStage, write: Actor[..., Any]
) -> None:
    # Given a group of a message and a pipeline
    chain = pipeline([write.message("b"), write.message("c")], broker=ledger.broker)
    whole = group_of(ledger, [write.message("a"), chain])

    # When it is waited for in the transaction with which it leaves, then that is refused
    with ledger.database.atomic():
        whole.run()
        with pytest.raises(WaitInsideTransaction):
            whole.wait(timeout=60_000)
        with pytest.raises(WaitInsideTransaction):
            chain.get_result(block=True, timeout=60_000)


def test_a_group_that_a_body_runs_leaves_with_its_commit(ledger: LedgerStage, write: Actor[..., Any]) -> None:
    # Given a body that runs a group and fails once
    runs: list[int] = []
    members = [write.message("a"), write.message("b")]

    @ledger.actor(min_backoff=10, max_backoff=20)
    def begin() -> None:
        runs.append(1)
        group_of(ledger, members).run()
        if len(runs) == 1:
            raise ValueError("not yet")

    # When it has committed
    with ledger.worker_and_relay():
        begin.send()
        eventually(lambda: "done" in ledger.effects())
        ledger.expect_settled()

    # Then its group was run once
    assert ledger.effects() == ["a", "b", "done"]
    assert barriers(ledger) == ([0], 0)
