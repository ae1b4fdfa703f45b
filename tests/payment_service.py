"""The payment service as a process of its own, and what it was asked for."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from contextlib import closing
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from actors import payments

from .processes import eventually
from .servers import PROJECT

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class PaymentService:
    """`gunicorn payments:app` on a port of its own.

    Arguments:
      folder: for its charges.
      env: the variables of this process.
    """

    def __init__(self, folder: Path, env: dict[str, str]) -> None:
        with closing(socket.socket()) as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.command = [
            *(sys.executable, "-m", "gunicorn", "payments:app", "--bind", f"127.0.0.1:{port}"),
            *("--threads", "32", "--keep-alive", "5", "--no-control-socket"),
        ]
        self.env = {**env, "PAYMENTS_FILE": str(folder / "payments.sqlite")}
        self.start()

    def start(self) -> None:
        """Start it, or start it again, and return when it answers."""
        self._process = subprocess.Popen(
            self.command, cwd=PROJECT, env=self.env, stderr=subprocess.DEVNULL, start_new_session=True
        )
        eventually(self._answers, 20)

    def _answers(self) -> bool:
        try:
            return httpx.get(f"{self.url}/charges").is_success
        except httpx.TransportError:
            return False

    def charges(self) -> list[dict[str, Any]]:
        """What was charged, with whether it was refunded."""
        found: list[dict[str, Any]] = httpx.get(f"{self.url}/charges").raise_for_status().json()
        return found

    def stop(self) -> None:
        """End it at once; whoever waits for an answer gets none."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PaymentService]:
    """A payment service that this process and its workers look for at its place."""
    service = PaymentService(tmp_path, dict(os.environ))
    monkeypatch.setenv("PAYMENTS_URL", service.url)
    with httpx.Client(base_url=service.url) as client:
        monkeypatch.setattr(payments, "client", client)
        yield service
    service.stop()
