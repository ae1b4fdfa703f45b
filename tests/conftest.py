"""Servers of the tests' own, started before anything reads the settings."""

from __future__ import annotations

from contextlib import ExitStack
from itertools import count
from typing import TYPE_CHECKING, Any

import pytest

from embedded import ServerError

from .processes import WorkerProcess
from .servers import Servers, running_servers, use_in_environment

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator
    from pathlib import Path

SERVERS = pytest.StashKey[Servers]()


def pytest_sessionstart(session: pytest.Session) -> None:
    # Before the collection, which imports test modules, and through them settings.py.
    stack = ExitStack()
    session.config.add_cleanup(stack.close)
    try:
        servers = stack.enter_context(running_servers())
    except ServerError as error:
        pytest.exit(str(error), returncode=3)
    use_in_environment(servers)
    session.config.stash[SERVERS] = servers


@pytest.fixture(scope="session")
def servers(pytestconfig: pytest.Config) -> Servers:
    """The session's servers, with the application's tables."""
    from models import database, migrate

    migrate()
    database.close()
    return pytestconfig.stash[SERVERS]


@pytest.fixture
def clean(servers: Servers) -> Servers:
    """The session's servers, running and without a row or a key."""
    servers.start()
    servers.empty()
    return servers


@pytest.fixture
def worker_process(tmp_path: Path) -> Iterator[Callable[..., WorkerProcess]]:
    """Starts worker processes that take messages when it returns; see `WorkerProcess`.

    All of them are killed when the test ends.
    """
    started: list[WorkerProcess] = []
    numbers = count(1)

    def start(**arguments: Any) -> WorkerProcess:
        worker = WorkerProcess(tmp_path / f"worker-{next(numbers)}.log", **arguments)
        started.append(worker)
        worker.ready()
        return worker

    yield start
    for worker in started:
        worker.kill()


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable() -> Generator[None, Any, Any]:
    """What a test printed may hold lone surrogates; the processes of the suite can send each other none."""
    return _sendable((yield))


def _sendable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {_sendable(key): _sendable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_sendable(item) for item in value)
    return value
