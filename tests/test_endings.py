"""How a delivery ends: what the actor, its hooks and its options decide.

For each row of the table in `docs/design/endings.md`: what SQL finds, the key, what Redis holds,
and whether a retry was spent.
"""

from __future__ import annotations

from time import monotonic, time
from typing import TYPE_CHECKING, Any

import pytest
from dramatiq.errors import Retry
from dramatiq.middleware import CurrentMessage, Middleware, SkipMessage

from .processes import eventually

if TYPE_CHECKING:
    from .stage import Stage

pytest_plugins = ("tests.stage",)

#: A COMMIT that waits for a lock.
COMMITS = "SELECT 1 FROM pg_stat_activity WHERE query = 'COMMIT' AND wait_event_type = 'Lock'"


def test_a_delivery_that_returns_commits_key_and_effect_and_is_acknowledged_i1(stage: Stage) -> None:
    # Given an actor with one effect
    @stage.actor()
    def write(label: str) -> None:
        stage.effect(label)

    # When its message is performed
    with stage.worker():
        message = write.send("a")
        stage.expect_in_redis()

    # Then key and effect are there, and Redis has forgotten the message
    assert stage.effects() == ["a"]
    assert stage.key_rows() == [("write", message.message_id)]


def test_nothing_is_acknowledged_before_the_commit_i2(stage: Stage) -> None:
    # Given a COMMIT that takes until a lock of ours is free
    stage.sql("""
        CREATE FUNCTION wait() RETURNS trigger LANGUAGE plpgsql AS
        'BEGIN SET LOCAL lock_timeout = 0; PERFORM pg_advisory_xact_lock(1); RETURN NULL; END'
    """)
    stage.sql(
        "CREATE CONSTRAINT TRIGGER wait AFTER INSERT ON effects DEFERRABLE INITIALLY DEFERRED "
        "FOR EACH ROW EXECUTE FUNCTION wait()"
    )

    @stage.actor(time_limit=50)
    def write(label: str) -> None:
        stage.effect(label)

    with stage.rival() as rival, stage.worker(time_limits=True):
        rival.execute("SELECT pg_advisory_lock(1)")
        # When the delivery has come to its COMMIT
        message = write.send("a")
        eventually(lambda: stage.sql(COMMITS))
        # Then it is not acknowledged, however long that takes
        assert stage.places() == {"in_hand": [message.message_id]}
        began = monotonic()
        eventually(lambda: monotonic() - began > 0.2)
        assert stage.places() == {"in_hand": [message.message_id]}
        # And when the COMMIT is through, it is; no time limit of the actor hit it meanwhile (T20)
        rival.execute("SELECT pg_advisory_unlock(1)")
        stage.expect_in_redis()
    assert stage.effects() == ["a"]
    assert [seen.hook for seen in stage.witness.seen] == ["returned"]


def test_a_delivery_that_finds_its_key_committed_changes_nothing_i1(stage: Stage) -> None:
    # Given a message that was performed
    @stage.actor()
    def write(label: str) -> None:
        stage.effect(label)

    with stage.worker():
        message = write.send("a")
        stage.expect_in_redis()

        # When it is delivered three times more
        for _ in range(3):
            stage.broker.enqueue(message)
        eventually(lambda: len(stage.seen("returned")) == 4)
        stage.expect_in_redis()

    # Then nothing has changed
    assert stage.effects() == ["a"]
    assert stage.key_rows() == [("write", message.message_id)]


@pytest.mark.parametrize(
    "constraint",
    [
        pytest.param("UNIQUE (label)", id="unique"),
        pytest.param("CHECK (label <> 'a')", id="check"),
        pytest.param("FOREIGN KEY (label) REFERENCES known", id="foreign-key"),
    ],
)
def test_no_constraint_but_that_of_the_key_means_duplicate_i4(stage: Stage, constraint: str) -> None:
    # Given a business constraint that the effect violates
    stage.sql("CREATE TABLE known (label text PRIMARY KEY)")
    if constraint.startswith("UNIQUE"):
        stage.sql("INSERT INTO effects VALUES ('a')")
    stage.sql(f"ALTER TABLE effects ADD {constraint}")
    before = stage.effects()

    @stage.actor()
    def write(label: str) -> None:
        stage.effect(label)

    # When a message meets it
    with stage.worker():
        message = write.send("a")
        stage.expect_in_redis(delayed=[message])

    # Then that is a failure like any other, and no duplicate
    assert stage.only("delayed").options["retries"] == 1
    assert stage.effects() == before
    assert stage.key_rows() == []


def test_a_unique_index_of_the_inbox_besides_the_key_does_not_mean_duplicate_i4_t12(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    # Given somebody's own unique index on the table of keys
    stage.sql("CREATE UNIQUE INDEX another ON processed_messages (consumer_name)")

    @stage.actor()
    def write(label: str) -> None:
        stage.effect(label)

    with stage.worker():
        write.send("a")
        stage.expect_in_redis()
        # When another message meets that index
        message = write.send("b")
        # Then it is no duplicate: it fails as the body would, and its retry is stored
        stage.expect_in_redis(delayed=[message])
    assert 'unique constraint "another"' in caplog.text
    assert stage.effects() == ["a"]


def test_an_exception_rolls_back_and_spends_a_retry_on_the_message_as_it_came_t17(stage: Stage) -> None:
    # Given an actor that writes, changes its arguments and raises
    @stage.actor()
    def write(labels: list[str], *, table: dict[str, Any]) -> None:
        stage.effect(labels.pop())
        table["touched"] = True
        raise ValueError("no")

    # When it is performed
    with stage.worker():
        message = write.send(["a"], table={})
        stage.expect_in_redis(delayed=[message])

    # Then nothing is stored, and what waits to be retried is what was sent
    assert stage.stored() == ([], [])
    retry = stage.only("delayed")
    assert retry.options["retries"] == 1
    assert (retry.args, retry.kwargs) == ((["a"],), {"table": {}})


def test_a_retry_applies_the_change_once_i1(stage: Stage) -> None:
    # Given an actor that fails at its first two attempts
    attempts: list[str] = []

    @stage.actor(min_backoff=20, max_backoff=40)
    def write(label: str) -> None:
        stage.effect(label)
        attempts.append(label)
        if len(attempts) < 3:
            raise ValueError("not yet")

    # When it is performed
    with stage.worker():
        message = write.send("a")
        eventually(lambda: stage.effects() == ["a"])
        stage.expect_in_redis()

    # Then the third attempt alone has taken effect
    assert len(attempts) == 3
    assert stage.key_rows() == [("write", message.message_id)]


def test_retry_with_a_delay_is_due_after_it(stage: Stage) -> None:
    # Given an actor that asks for another attempt in an hour
    @stage.actor()
    def write(label: str) -> None:
        stage.effect(label)
        raise Retry(delay=3_600_000)

    # When it is performed
    with stage.worker():
        message = write.send("a")
        stage.expect_in_redis(delayed=[message])

    # Then nothing is stored, and it is due in an hour
    retry = stage.only("delayed")
    assert retry.options["retries"] == 1
    assert 3_500 < retry.options["eta"] / 1_000 - time() <= 3_600
    assert stage.stored() == ([], [])


@pytest.mark.parametrize("skipped_by", ["actor", "middleware"])
def test_a_skipped_message_is_rolled_back_and_acknowledged_t29(stage: Stage, skipped_by: str) -> None:
    # Given an actor, or a middleware, that skips
    class Skipper(Middleware):
        def before_process_message(self, broker: Any, message: Any) -> None:
            if skipped_by == "middleware":
                raise SkipMessage("not today")

    stage.broker.add_middleware(Skipper())

    @stage.actor()
    def write(label: str) -> None:
        stage.effect(label)
        raise SkipMessage("not today")

    # When its message is delivered
    with stage.worker():
        write.send("a")
        eventually(lambda: stage.seen("skipped"))
        stage.expect_in_redis()

    # Then there is no trace of it
    assert stage.stored() == ([], [])
    assert len(stage.witness.seen) == 1


def test_a_message_that_its_body_enqueues_again_is_no_retry(stage: Stage) -> None:
    # Given an actor that enqueues its own message for later, and then fails
    stage.broker.add_middleware(CurrentMessage())

    @stage.actor()
    def write(label: str) -> None:
        stage.effect(label)
        message = CurrentMessage.get_current_message()
        assert message is not None
        stage.broker.enqueue(message, delay=3_600_000)
        raise ValueError("no")

    # When it is performed
    with stage.worker():
        message = write.send("a")
        # Then both wait: what it enqueued, and its retry
        stage.expect_in_redis(delayed=[message, message])
    retries = [copy.options.get("retries", 0) for copy in stage.messages("delayed")]
    assert sorted(retries) == [0, 1]


def test_a_retry_that_cannot_be_stored_because_redis_is_away_is_no_end_i9_t9(stage: Stage) -> None:
    # Given an actor that fails twice, the first time while Redis is away
    attempts: list[str] = []

    @stage.actor()
    def write(labels: list[str]) -> None:
        attempts.append(labels.pop())
        stage.effect("a")
        if len(attempts) == 1:
            stage.servers.redis.stop("immediate")
        raise ValueError("no")

    with stage.worker():
        message = write.send(["a"])
        eventually(lambda: stage.seen("raised"))
        # When Redis is back
        stage.servers.redis.start()
        stage.expect_in_redis(delayed=[message])

    # Then the message was given back as it was, and only the second failure has spent a retry
    assert attempts == ["a", "a"]
    assert stage.only("delayed").options["retries"] == 1
    assert stage.stored() == ([], [])
