"""Servers and workers that stand still, or are away."""

from __future__ import annotations

import os
from contextlib import contextmanager
from signal import SIGCONT, SIGSTOP
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from embedded import Server


@contextmanager
def paused(pid: int) -> Iterator[None]:
    """A process that stands still."""
    os.kill(pid, SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, SIGCONT)


@contextmanager
def stopped(server: Server) -> Iterator[None]:
    """A server that is away."""
    server.stop()
    try:
        yield
    finally:
        server.start()
