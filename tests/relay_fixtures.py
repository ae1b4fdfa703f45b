"""Fixtures of the tests of the relay; a test module names this file in pytest_plugins."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Any

import pytest

from embedded import temporary_folder
from middleware.relay import Relay

from .ledger_stage import LedgerStage
from .relays import ForgetfulValkey, RelayProcess
from .servers import Servers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from dramatiq import Actor


@pytest.fixture
def forgetful(clean: Servers) -> Iterator[Servers]:
    """The session's PostgreSQL with a Redis that a crash empties."""
    with temporary_folder() as folder, ForgetfulValkey(folder) as redis:
        yield Servers(clean.postgres, redis)


@pytest.fixture
def relay_beside(tmp_path: Path) -> Iterator[Callable[..., RelayProcess]]:
    """Starts relays beside a stage; all of them are killed when the test ends."""
    started: list[RelayProcess] = []
    numbers = count(1)

    def start(stage: LedgerStage, **arguments: object) -> RelayProcess:
        number = next(numbers)
        relay = RelayProcess(stage, tmp_path / f"relay-{number}.log", f"relay-{number}", **arguments)  # type: ignore[arg-type]
        started.append(relay)
        return relay

    yield start
    for relay in started:
        relay.kill()


@pytest.fixture
def write(ledger: LedgerStage) -> Actor[..., Any]:
    """An actor whose effect is its label."""

    @ledger.actor()
    def write(label: str, load: str = "") -> None:
        ledger.effect(label)

    return write


@pytest.fixture
def relay(ledger: LedgerStage) -> Relay:
    """A relay that does one round when it is asked to."""
    assert ledger.broker.ledger is not None
    return Relay(ledger.broker, ledger.broker.ledger)


@pytest.fixture
def frail(forgetful: Servers) -> Iterator[LedgerStage]:
    """A stage whose Redis forgets everything in a crash."""
    stage = LedgerStage(forgetful)
    yield stage
    forgetful.start()
    stage.close()
