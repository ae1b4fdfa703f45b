"""How a delivery ends that the database leaves in the lurch."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import peewee
import pytest

from middleware.errors import LimitExceeded

from .lossy_proxy import LossyProxy, Lost
from .processes import eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from .servers import Servers
    from .stage import Stage

pytest_plugins = ("tests.stage",)


def backend(stage: Stage) -> int:
    """The process that serves the body's connection."""
    pid: int = stage.database.execute_sql("SELECT pg_backend_pid()").fetchone()[0]
    return pid


def is_gone(stage: Stage, pid: int) -> bool:
    return not stage.sql("SELECT 1 FROM pg_stat_activity WHERE pid = %s", pid)


def said(caplog: pytest.LogCaptureFixture, level: str) -> list[str]:
    """What the log says of PostgreSQL at a level."""
    return [
        record.getMessage()
        for record in caplog.records
        if (record.name, record.levelname) == ("onetake", level) and "PostgreSQL" in record.getMessage()
    ]


@pytest.mark.parametrize("swallows", [False, True])
def test_a_connection_that_is_lost_in_the_body_gives_the_message_back_i9_t5(
    stage: Stage, swallows: bool
) -> None:
    # Given an actor without retries whose connection is lost at its first attempt
    attempts: list[dict[str, bytes]] = []

    @stage.actor(max_retries=0)
    def write(labels: list[str]) -> None:
        label = labels.pop()
        stage.effect(label)
        attempts.append(stage.raw("in_hand"))
        if len(attempts) == 1:
            pid = backend(stage)
            stage.sql("SELECT pg_terminate_backend(%s)", pid)
            eventually(lambda: is_gone(stage, pid))
            try:
                stage.effect("more")
            except peewee.PeeweeException:
                if not swallows:
                    raise

    # When it is performed by one thread
    with stage.worker(threads=1):
        write.send(["a"])
        stage.expect_in_redis()

    # Then the same message came again as it was, and took effect once
    assert attempts[0] == attempts[1]
    assert stage.effects() == ["a"]
    assert len(stage.key_rows()) == 1
    assert [seen.hook for seen in stage.witness.seen] == ["skipped", "returned"]


@pytest.mark.parametrize("lost", ["question", "answer"])
def test_a_connection_that_is_lost_at_commit_gives_the_message_back_i1_i9(
    clean: Servers, stage_with: Callable[..., Stage], lost: Lost
) -> None:
    # Given a connection that breaks at COMMIT, before or after the server has committed
    with LossyProxy(clean.postgres.url) as proxy:
        stage = stage_with(address=proxy.address)
        bodies: list[str] = []

        @stage.actor(max_retries=0)
        def write(label: str) -> None:
            bodies.append(label)
            stage.effect(label)
            if len(bodies) == 1:
                proxy.lose(lost, "COMMIT")

        # When the message is performed
        with stage.worker():
            message = write.send("a")
            stage.expect_in_redis()

    # Then the next delivery found the key, or did the work
    assert proxy.losses == 1
    assert bodies == (["a"] if lost == "answer" else ["a", "a"])
    assert stage.effects() == ["a"]
    assert stage.key_rows() == [("write", message.message_id)]
    assert [seen.hook for seen in stage.witness.seen] == ["skipped", "returned"]


def test_a_connection_that_is_lost_after_the_claim_was_sent_costs_no_retry_i9(
    clean: Servers, stage_with: Callable[..., Stage]
) -> None:
    # Given a connection that breaks when the server has the claim and the answer is under way
    with LossyProxy(clean.postgres.url) as proxy:
        stage = stage_with(address=proxy.address)

        @stage.actor(max_retries=0)
        def write(label: str) -> None:
            stage.effect(label)

        proxy.lose("answer", "BEGIN; ")
        # When the message is performed
        with stage.worker():
            write.send("a")
            stage.expect_in_redis()

    # Then it took effect once
    assert proxy.losses == 1
    assert stage.effects() == ["a"]
    assert len(stage.key_rows()) == 1


@pytest.mark.parametrize("sqlstate", ["53100", "53200", "58030", "57P01", "25006"])
def test_trouble_of_the_server_in_the_body_gives_the_message_back_i9(stage: Stage, sqlstate: str) -> None:
    # Given a server that is in trouble once: disk full, no memory, I/O error, going away, read-only
    stage.sql("CREATE SEQUENCE attempts")

    @stage.actor(max_retries=0)
    def write(labels: list[str]) -> None:
        stage.effect(labels.pop())
        stage.database.execute_sql(
            "DO $$ BEGIN IF nextval('attempts') = 1 THEN "
            f"RAISE EXCEPTION 'trouble' USING ERRCODE = '{sqlstate}'; END IF; END $$"
        )

    # When the message is performed
    with stage.worker():
        write.send(["a"])
        stage.expect_in_redis()

    # Then its second delivery took effect, and no retry was spent
    assert stage.effects() == ["a"]
    assert len(stage.key_rows()) == 1
    assert [seen.hook for seen in stage.witness.seen] == ["skipped", "returned"]


def test_a_body_that_is_silent_for_its_idle_limit_fails_and_hears_of_the_option(stage: Stage) -> None:
    # Given an actor that does something else for longer than its idle limit
    @stage.actor(idle_limit_ms=150)
    def write(label: str) -> None:
        stage.effect(label)
        pid = backend(stage)
        eventually(lambda: is_gone(stage, pid))
        stage.effect("too late")

    # When it is performed
    with stage.worker():
        message = write.send("a")
        stage.expect_in_redis(delayed=[message])

    # Then a retry was spent, and the error names what to raise
    assert stage.only("delayed").options["retries"] == 1
    assert stage.stored() == ([], [])
    (seen,) = stage.seen("raised")
    assert isinstance(seen.outcome, LimitExceeded)
    assert "idle_limit_ms" in str(seen.outcome)


def test_a_transaction_that_grows_too_old_fails_and_hears_of_the_option(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given an actor that no time limit stops, and a server that ends its transaction
    monkeypatch.setattr("middleware.performer.TRANSACTION_GRACE_MS", 100)

    @stage.actor(time_limit=100)
    def write(label: str) -> None:
        stage.effect(label)
        while True:
            stage.database.execute_sql("SELECT pg_sleep(0.01)")

    # When it is performed
    with stage.worker():
        message = write.send("a")
        stage.expect_in_redis(delayed=[message])

    # Then a retry was spent, and the error names what to raise
    assert stage.only("delayed").options["retries"] == 1
    assert stage.stored() == ([], [])
    (seen,) = stage.seen("raised")
    assert isinstance(seen.outcome, LimitExceeded)
    assert "time_limit" in str(seen.outcome)


def test_a_delivery_waits_for_an_absent_database_and_spends_nothing_i9_t1(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    # Given a database that is away, and actors without retries and with little time
    caplog.set_level(logging.INFO, "onetake")

    @stage.actor(max_retries=0, time_limit=50)
    def write(label: str) -> None:
        stage.effect(label)

    stage.hang_up()
    stage.servers.postgres.stop("immediate")

    # When messages are delivered meanwhile, and it comes back
    with stage.worker(time_limits=True):
        messages = [write.send("a"), write.send("b")]
        eventually(lambda: said(caplog, "WARNING"))
        stage.expect_in_redis(in_hand=messages)
        stage.servers.postgres.start()
        stage.expect_in_redis()

    # Then they took effect; the log told of it once when it went and once when it was back
    assert stage.effects() == ["a", "b"]
    assert [seen.hook for seen in stage.witness.seen] == ["returned", "returned"]
    assert len(said(caplog, "WARNING")) == len(said(caplog, "INFO")) == 1


@pytest.fixture
def guest(clean: Servers, stage_with: Callable[..., Stage]) -> Iterator[Stage]:
    """A stage whose workers are a user that can be refused."""
    stage = stage_with()
    stage.sql("DROP ROLE IF EXISTS guest")
    stage.sql("CREATE ROLE guest LOGIN")
    yield stage_with(user="guest")
    stage.sql("DROP OWNED BY guest; DROP ROLE guest")


REFUSALS = {
    "login": ("ALTER ROLE guest NOLOGIN", "ALTER ROLE guest LOGIN"),
    "53300": ("ALTER ROLE guest CONNECTION LIMIT 0", "ALTER ROLE guest CONNECTION LIMIT -1"),
    "25006": (
        "ALTER ROLE guest SET default_transaction_read_only = on",
        "ALTER ROLE guest RESET default_transaction_read_only",
    ),
    "no table": (
        "ALTER TABLE processed_messages RENAME TO elsewhere",
        "ALTER TABLE elsewhere RENAME TO processed_messages",
    ),
    "no right": (
        "REVOKE INSERT ON processed_messages FROM PUBLIC",
        "GRANT INSERT ON processed_messages TO PUBLIC",
    ),
}


@pytest.mark.parametrize("refusal", REFUSALS)
def test_a_delivery_waits_whatever_the_reason_it_cannot_begin_i9(
    guest: Stage, caplog: pytest.LogCaptureFixture, refusal: str
) -> None:
    # Given a reason why no transaction can begin, and an actor without retries
    refuse, admit = REFUSALS[refusal]
    guest.sql(refuse)

    @guest.actor(max_retries=0)
    def write(label: str) -> None:
        guest.effect(label)

    # When a message is delivered, and the reason goes away
    with guest.worker():
        message = write.send("a")
        eventually(lambda: said(caplog, "WARNING"))
        guest.expect_in_redis(in_hand=[message])
        guest.sql(admit)
        guest.expect_in_redis()

    # Then it took effect
    assert guest.effects() == ["a"]
    assert [seen.hook for seen in guest.witness.seen] == ["returned"]


@pytest.mark.parametrize("options", [{"time_limit": 2**31 * 1_000}, {"time_limit": float("inf")}], ids=str)
def test_a_time_limit_beyond_what_postgresql_knows_means_none(stage: Stage, options: Any) -> None:
    # Given an actor that may take longer than any limit of the server's
    @stage.actor(**options)
    def write(label: str) -> None:
        stage.effect(label)

    # When it is performed
    with stage.worker():
        write.send("a")
        stage.expect_in_redis()

    # Then it took effect
    assert stage.effects() == ["a"]
