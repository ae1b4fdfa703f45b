"""Fixtures of the tests of crashes and faults; a test module names this file in pytest_plugins."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from .crew import Crew
from .shop import Shop
from .signals import VARIABLE, signals

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.processes import WorkerProcess
    from tests.servers import Servers


@pytest.fixture(scope="session")
def signals_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Known to all processes by their environment."""
    folder = tmp_path_factory.mktemp("signals")
    os.environ[VARIABLE] = str(folder)
    return folder


@pytest.fixture
def shop(signals_folder: Path, clean: Servers) -> Iterator[Shop]:
    """A shop with full stock, without orders, messages and signals."""
    signals.forget()
    shop = Shop(clean)
    yield shop
    signals.forget()
    shop.redis.close()


@pytest.fixture
def crew(signals_folder: Path, tmp_path: Path) -> Iterator[Crew]:
    """Starts workers that end with the test."""
    crew = Crew(tmp_path)
    yield crew
    crew.kill()


@pytest.fixture(params=["threads", "gevent"])
def lone_worker(request: pytest.FixtureRequest, shop: Shop, crew: Crew) -> WorkerProcess:
    """A worker of one thread or greenlet, which has to go on whatever happens to it (I8)."""
    return crew.start(kind=request.param, threads=1)
