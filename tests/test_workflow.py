"""What became of a message: what set it off and what it set off, with the state of each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from dramatiq import group, pipeline

from middleware.errors import ConfigurationError
from middleware.workflow import MAX_STEPS, Step, lines_of

from .processes import eventually
from .test_database import backend, scalar
from .test_sessions import statements_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from .ledger_stage import LedgerStage
    from .stage import Stage

pytest_plugins = ("tests.stage", "tests.ledger_stage")


def states(step: Step | None) -> list[tuple[str | None, str]]:
    """Consumer and state of each step, each before what it set off."""
    assert step is not None
    return [(one.consumer_name, one.state) for one in step]


@pytest.fixture
def shop(ledger: LedgerStage) -> dict[str, Any]:
    """An actor that sends two, one of which sends another."""

    @ledger.actor(consumer_name="letters")
    def tell(text: str) -> None:
        ledger.effect(text)

    @ledger.actor()
    def ship(order: int) -> str:
        tell.send(f"shipped {order}")
        return f"parcel {order}"

    @ledger.actor(max_retries=0)
    def charge(order: int) -> None:
        if order < 0:
            raise ValueError("no such order\nsecond line")

    @ledger.actor()
    def place(order: int) -> None:
        charge.send(order)
        ship.send(abs(order))

    return {actor.actor_name: actor for actor in (tell, ship, charge, place)}


def test_whichever_message_is_asked_for_the_whole_workflow_is_told(
    ledger: LedgerStage, shop: dict[str, Any]
) -> None:
    # Given a message that set off two, one of which set off another
    with ledger.worker_and_relay():
        first = ledger.send(shop["place"].message(7))
        eventually(ledger.effects)
        ledger.expect_settled()

    # When the workflow of each of them is asked for
    whole = ledger.broker.workflow_of(first.message_id)
    assert whole is not None

    # Then each answer is the same whole
    assert states(whole) == [("place", "done"), ("charge", "done"), ("ship", "done"), ("letters", "done")]
    for step in whole:
        assert ledger.broker.workflow_of(step.message_id) == whole
        assert step.at is not None
        assert step.sent_at is not None
        assert step.sent_at <= step.at
    assert whole.parent_id is None
    assert {one.parent_id for one in whole.sets_off} == {first.message_id}


def test_each_state_is_told(ledger: LedgerStage, shop: dict[str, Any]) -> None:
    # Given a workflow with a step that is dead
    with ledger.worker_and_relay():
        first = ledger.send(shop["place"].message(-7))
        eventually(ledger.effects)
        ledger.expect_settled()

    # Then that is told, with its error
    whole = ledger.broker.workflow_of(first.message_id)
    assert whole is not None
    assert [one.state for one in whole] == ["done", "dead", "done", "done"]
    assert whole.sets_off[0].reason is not None
    assert "no such order" in whole.sets_off[0].reason

    # And given messages that wait, are due, are published, were cancelled: then that is told
    later = ledger.send(shop["tell"].message("later"), delay=60_000)
    due = ledger.send(shop["tell"].message("due"))
    assert states(ledger.broker.workflow_of(later.message_id)) == [("letters", "waiting")]
    assert states(ledger.broker.workflow_of(due.message_id)) == [("letters", "due")]
    with ledger.relay():
        eventually(ledger.in_redis)
    assert states(ledger.broker.workflow_of(due.message_id)) == [("letters", "published")]
    assert ledger.broker.cancel(later)
    assert states(ledger.broker.workflow_of(later.message_id)) == [("letters", "cancelled")]

    # And of a message that nobody knows nothing is
    assert ledger.broker.workflow_of("no such message") is None


def test_the_steps_of_a_pipeline_that_are_to_come_are_told(ledger: LedgerStage) -> None:
    # Given a pipeline of which nothing has run
    @ledger.actor()
    def step(*results: Any) -> int:
        ledger.effect(f"{results}")
        return 1

    chain = pipeline([step.message(), step.message(), step.message()], broker=ledger.broker)
    with ledger.database.atomic():
        chain.run()
    ids = [message.message_id for message in chain.messages]

    # Then its later steps are to come
    before = ledger.broker.workflow_of(ids[0])
    assert states(before) == [("step", "due"), ("step", "to come"), ("step", "to come")]
    assert before is not None
    assert [one.message_id for one in before] == ids

    # And when all have run, each was set off by the one before
    with ledger.worker_and_relay():
        eventually(lambda: len(ledger.effects()) == 3)
        ledger.expect_settled()
    after = ledger.broker.workflow_of(ids[2])
    assert after is not None
    assert [(one.message_id, one.state) for one in after] == [(one, "done") for one in ids]


def test_a_group_is_found_from_the_message_that_ran_it(ledger: LedgerStage) -> None:
    # Given a body that runs a group with a callback
    @ledger.actor()
    def member(_number: int) -> None: ...

    @ledger.actor()
    def finish() -> None:
        ledger.effect("complete")

    @ledger.actor()
    def start() -> None:
        members = group([member.message(number) for number in range(3)], broker=ledger.broker)
        members.add_completion_callback(finish.message())
        members.run()

    # When all is done
    with ledger.worker_and_relay():
        first = ledger.send(start.message())
        eventually(ledger.effects)
        ledger.expect_settled()

    # Then the callback stands below the member that was the last
    whole = states(ledger.broker.workflow_of(first.message_id))
    assert sorted(whole[1:]) == [("finish", "done"), *[("member", "done")] * 3]


def test_a_business_key_is_told_and_found_by_the_message_that_did_the_work(ledger: LedgerStage) -> None:
    # Given two messages of one business key
    @ledger.actor()
    def charge() -> None:
        ledger.effect("charged")

    with ledger.worker_and_relay():
        first = ledger.send(charge.message_with_options(idempotency_key="order-7"))
        eventually(ledger.effects)
        second = ledger.send(charge.message_with_options(idempotency_key="order-7"))
        ledger.expect_settled()

    # Then the first is done under that key, and of the second nothing is left
    found = ledger.broker.workflow_of(first.message_id)
    assert found is not None
    assert (found.state, found.key) == ("done", "order-7")
    assert ledger.broker.workflow_of(second.message_id) is None


def test_what_a_message_without_a_trace_set_off_is_told_below_it(ledger: LedgerStage) -> None:
    # Given a message whose parent has no row
    ledger.sql(
        "INSERT INTO processed_messages (consumer_name, message_id, performed_by, payload_digest, "
        "digest_version, parent_id) VALUES ('letters', 'child', 'child', '', 1, 'parent')"
    )

    # When either is asked for; then the parent is there and unknown
    for ident in ("child", "parent"):
        assert states(ledger.broker.workflow_of(ident)) == [(None, "unknown"), ("letters", "done")]


@pytest.mark.parametrize(
    ("parent_of", "count"),
    [
        ("CASE number WHEN 0 THEN NULL ELSE '0' END", MAX_STEPS + 2),  # a body that sends very many
        ("CASE number WHEN 0 THEN NULL ELSE (number - 1)::text END", 5_001),  # one that sends the next
        ("((number + 1) %% 3)::text", 3),  # ids made by hand, which go round in a circle
    ],
    ids=["wide", "deep", "a circle"],
)
def test_a_workflow_without_end_is_told_in_part(ledger: LedgerStage, parent_of: str, count: int) -> None:
    # Given very many messages
    ledger.sql(
        "INSERT INTO processed_messages (consumer_name, message_id, performed_by, payload_digest, "
        f"digest_version, parent_id) SELECT 'c', number::text, number::text, '', 1, {parent_of} "
        "FROM generate_series(0, %s) number",
        count - 1,
    )

    # When one is asked for
    whole = ledger.broker.workflow_of(str(count // 2))
    assert whole is not None

    # Then it is among what is told, and what is left out is said
    steps = list(whole)
    lines = list(lines_of(whole, str(count // 2)))
    assert len(steps) <= MAX_STEPS + 1
    assert [line for line in lines if line.startswith(">")]
    assert any("more" in line for line in lines) == (count > 3)


def test_nothing_in_a_line_moves_the_terminal() -> None:
    # Given a name and an error that hold control characters; when they are shown
    (line,) = lines_of(Step("id\x1b[2J", "a\tb", "dead", reason="bad\x07\nTraceback"), "")

    # Then they are written out, and of the error its first line is there
    assert line == r"  a\tb  dead  id\x1b[2J  (bad\x07)"


def test_without_a_ledger_nobody_knows(stage: Stage) -> None:
    # Given a broker without ledger; when it is asked; then it says what it needs
    with pytest.raises(ConfigurationError, match=r"ledger=\(\.\.\.\)"):
        stage.broker.workflow_of("any")


def test_a_claim_takes_parent_and_time_from_the_row_without_a_further_statement(
    ledger_with: Callable[..., LedgerStage],
) -> None:
    # Given a worker whose statements the server writes down
    ledger = ledger_with(session={"log_statement": "all"})
    pids: list[int] = []
    sent_at: list[object] = []

    @ledger.actor()
    def child() -> None:
        pids.append(backend(ledger.database))

    @ledger.actor()
    def parent() -> None:
        child.send()
        sent_at.append(scalar(ledger.database, "SELECT sent_at FROM outbox_messages"))

    # When it performs a message that another message set off
    with ledger.worker_and_relay(threads=1):
        first = ledger.send(parent.message())
        eventually(lambda: len(ledger.done()) == 2)
        ledger.expect_settled()

    # Then the key has both, and its transaction took three statements, of which one is the body's
    found = ledger.sql("SELECT parent_id, sent_at FROM processed_messages WHERE consumer_name = 'child'")
    assert found == [(first.message_id, sent_at[-1])]
    begin, _, commit = statements_of(ledger, pids[0])[-3:]
    assert begin.startswith("BEGIN; ")
    assert commit == "COMMIT"
