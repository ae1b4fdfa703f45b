"""What is set and prepared for a session, and what for a transaction (T6)."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest

from middleware import Database

from .processes import eventually
from .test_database import backend, scalar

if TYPE_CHECKING:
    from collections.abc import Callable

    from .servers import Servers
    from .stage import Stage

pytest_plugins = ("tests.stage",)


LIMITS = "lock_timeout", "idle_in_transaction_session_timeout", "transaction_timeout"


def limits(database: Database) -> list[str]:
    return [scalar(database, f"SHOW {name}") for name in LIMITS]


def test_every_session_has_its_limits_t6(clean: Servers) -> None:
    # Given a database with its defaults, and one without limits
    database = Database(clean.postgres.url)
    endless = Database(clean.postgres.url, lock_timeout_ms=0, idle_limit_ms=0, transaction_timeout_ms=0)

    # When a session asks for them
    # Then they are those of the contract, and none
    assert limits(database) == ["2s", "1min", "630s"]
    assert limits(endless) == ["0", "0", "0"]
    parameters = database.connection().info.dsn_parameters
    assert {name: parameters[name] for name in parameters if "alive" in name or "timeout" in name} == {
        "connect_timeout": "5",
        "keepalives_idle": "10",
        "keepalives_interval": "5",
        "keepalives_count": "3",
        "tcp_user_timeout": "25000",
    }
    for one in (database, endless):
        one.close()


@pytest.mark.parametrize("pgbouncer", [False, True])
def test_an_actor_has_limits_of_its_own_for_its_transaction_t6(
    stage_with: Callable[..., Stage], pgbouncer: bool
) -> None:
    # Given actors that may be silent, or take, longer than others
    stage = stage_with(database={"lock_timeout_ms": 2_000, "pgbouncer": pgbouncer})
    seen: dict[str, list[str]] = {}

    def look(name: str) -> None:
        seen[name] = limits(stage.database)

    actors: dict[str, dict[str, Any]] = {
        "plain": {},
        "silent": {"idle_limit_ms": 300_000},
        "never silent": {"idle_limit_ms": 0},
        "long": {"time_limit": 3_600_000},
        "short": {"time_limit": 1_000},
        "endless": {"time_limit": float("inf")},
        "plain again": {},
    }
    for name, options in actors.items():
        stage.actor(actor_name=name, **options)(look)

    # When one thread performs them one after the other
    with stage.worker(threads=1):
        for name in actors:
            stage.broker.get_actor(name).send(name)
        stage.expect_in_redis()

    # Then each had its own, and left nothing to the next
    assert seen == {
        "plain": ["2s", "1min", "630s"],
        "silent": ["2s", "5min", "630s"],
        "never silent": ["2s", "0", "630s"],
        "long": ["2s", "1min", "3630s"],
        "short": ["2s", "1min", "31s"],
        "endless": ["2s", "1min", "0"],
        "plain again": ["2s", "1min", "630s"],
    }


def statements_of(stage: Stage, pid: int) -> list[str]:
    """What a backend was asked to run, from the server's log."""
    log = stage.servers.postgres.log.read_text(errors="replace")
    return re.findall(rf"\[{pid}\] LOG:  statement: (.*)", log)


def kind_of(statement: str) -> str:
    """A letter: a SET or PREPARE of the session, a BEGIN with or without SET LOCAL, or any other text."""
    if "SET LOCAL" in statement:
        return "L"
    kinds = {"SET": "S", "PREPARE": "P", "BEGIN": "B"}
    return kinds.get(re.split(r"[ ;]", statement)[0], "T")


@pytest.mark.parametrize("pgbouncer", [False, True])
def test_behind_pgbouncer_nothing_is_set_or_prepared_for_a_session_t6(
    stage_with: Callable[..., Stage], pgbouncer: bool
) -> None:
    # Given a worker whose statements the server writes down
    stage = stage_with(session={"log_statement": "all"}, database={"pgbouncer": pgbouncer})
    pids: set[int] = set()
    prepared: list[int] = []

    @stage.actor()
    def write(label: str) -> None:
        pids.add(backend(stage.database))
        prepared.append(scalar(stage.database, "SELECT count(*) FROM pg_prepared_statements"))
        stage.effect(label)

    # When it performs messages and duplicates, and some code has a transaction of its own
    with stage.worker(threads=1):
        messages = [write.send(label) for label in ("a", "b")]
        stage.expect_in_redis()
        for message in messages:
            stage.broker.enqueue(message)
        eventually(lambda: len(stage.seen("returned")) == 4)
        stage.expect_in_redis()
    with stage.database.atomic():
        pids.add(backend(stage.database))
        assert limits(stage.database)[0] == "300ms"

    # Then behind pgbouncer every SET is LOCAL and nothing is prepared; else both come once, first
    assert stage.effects() == ["a", "b"]
    assert len(pids) == 2
    for statements in (statements_of(stage, pid) for pid in pids):
        kinds = "".join(kind_of(text) for text in statements)
        assert re.fullmatch("(B?LT*)+" if pgbouncer else "S+P?(BT*)+", kinds), statements
    assert prepared == ([0, 0] if pgbouncer else [1, 1])


@pytest.mark.parametrize("pgbouncer", [False, True])
def test_the_claim_travels_with_begin_in_one_round_trip(
    stage_with: Callable[..., Stage], pgbouncer: bool
) -> None:
    # Given a worker whose statements the server writes down
    stage = stage_with(session={"log_statement": "all"}, database={"pgbouncer": pgbouncer})
    pids: set[int] = set()

    @stage.actor()
    def write(label: str) -> None:
        pids.add(backend(stage.database))
        stage.effect(label)

    # When it performs two messages
    with stage.worker(threads=1):
        for label in ("a", "b"):
            write.send(label)
        stage.expect_in_redis()

    # Then the last one took four statements, of which two are the body's
    (pid,) = pids
    begin, *body, commit = statements_of(stage, pid)[-4:]
    assert begin.startswith("BEGIN; ")
    assert len(body) == 2
    assert commit == "COMMIT"
