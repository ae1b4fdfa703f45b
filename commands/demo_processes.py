"""The processes of the demo: two workers, a relay and the payment service."""

from __future__ import annotations

import signal
import sys
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any, Literal

import click

import settings

from . import configuration
from .process import PROJECT, ProcessGroup

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .interruption import Interruption

Kind = Literal["payments", "threads", "gevent", "relay"]

KINDS: tuple[Kind, ...] = ("payments", "threads", "gevent", "relay")

STOP_LIMIT_S = 5

BESIDE_PYTHON = Path(sys.executable).parent
ACTORS = ["commands.demo_actors", "--processes", "1", "--threads", "4"]

SERVICE = ["payments:app", "--threads", "32", "--keep-alive", "5", "--no-control-socket"]

#: Through Python: the first line of a script finds none in a path with a space.
COMMANDS: dict[Kind, list[str]] = {
    "threads": [sys.executable, str(BESIDE_PYTHON / "dramatiq"), *ACTORS],
    "gevent": [sys.executable, str(BESIDE_PYTHON / "dramatiq-gevent"), *ACTORS],
    "relay": [sys.executable, str(PROJECT / "manage.py"), "relay"],
    "payments": [sys.executable, str(BESIDE_PYTHON / "gunicorn"), *SERVICE],
}
#: What each prints when it is at work.
READY: dict[Kind, bytes] = {
    "threads": b"ready for action",
    "gevent": b"ready for action",
    "relay": b"relay is at work",
    "payments": b"Booting worker",
}


class DemoProcesses:
    """A worker of threads, a worker of greenlets, a relay, and the payment service.

    Arguments:
      logs: the folder for what they print.
      interruption: is asked in all that takes its time.
    """

    def __init__(self, logs: Path, interruption: Interruption) -> None:
        self._logs = logs
        self._interruption = interruption
        self._groups: dict[Kind, ProcessGroup] = {}

    def start(self, kind: Kind) -> None:
        """Start one, or start it again, and return when it is at work."""
        log = self._logs / kind
        with log.open("wb") as output:
            address = ["--bind", f"127.0.0.1:{settings.PAYMENTS_PORT}"] if kind == "payments" else []
            command = COMMANDS[kind] + address
            self._groups[kind] = ProcessGroup(command, configuration.environment(), output)
        while READY[kind] not in log.read_bytes():
            self.check()
            self._interruption.pause(0.05)

    def kill(self, kind: Kind) -> None:
        """Send SIGKILL to one, whatever it is doing."""
        self._groups.pop(kind).kill()

    def kill_in_mid_work(self, kind: Kind) -> int:
        """Send SIGKILL to a worker if it has deliveries in hand; returns how many it had.

        It is stopped for the look. If it happens to rest at that moment it goes on.
        """
        group = self._groups[kind]
        group.signal(signal.SIGSTOP)
        counts = counted()
        in_hand = counts.get(f"started:{group.pid}", 0) - counts.get(f"ended:{group.pid}", 0)
        if in_hand > 0:
            self.kill(kind)
        else:
            group.signal(signal.SIGCONT)
        return in_hand

    @contextmanager
    def workers_stand_still(self) -> Iterator[None]:
        """Stop both workers, as a busy machine would, and let them go on at the end."""
        groups = [group for kind, group in self._groups.items() if kind in ("threads", "gevent")]
        try:
            for group in groups:
                group.signal(signal.SIGSTOP)
            yield
        finally:
            for group in groups:
                group.signal(signal.SIGCONT)

    def is_running(self, kind: Kind) -> bool:
        """Whether one was started and not killed since."""
        return kind in self._groups

    def check(self) -> None:
        """Go on, if none has ended by itself.

        Raises:
          ClickException: one has.
        """
        for kind, group in self._groups.items():
            if not group.is_running:
                raise click.ClickException(f"The process of {kind} ended.\n{self.last_words()}")

    def last_words(self) -> str:
        """The ends of their logs."""
        lines = []
        for log in (self._logs / kind for kind in KINDS if (self._logs / kind).exists()):
            lines += [f"{log.name}:", *log.read_text(errors="replace").splitlines()[-20:]]
        return "\n".join(lines)

    def close(self) -> None:
        """End all, in good order if they manage that soon."""
        for group in self._groups.values():
            group.terminate()
        deadline = monotonic() + STOP_LIMIT_S
        while any(group.is_running for group in self._groups.values()) and monotonic() < deadline:
            sleep(0.05)
        for group in self._groups.values():
            group.kill()


def counted() -> dict[str, int]:
    """What the workers have counted; see `COUNTS`."""
    from actors import broker

    from .demo_actors import COUNTS

    counts: Any = broker.client.hgetall(COUNTS)
    return {name.decode(): int(count) for name, count in counts.items()}
