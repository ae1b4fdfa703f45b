"""The two workers of the demo: started, killed in mid-work, and asked what they did."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any, Literal

import click

from . import configuration
from .process import ProcessGroup

if TYPE_CHECKING:
    from .interruption import Interruption

Kind = Literal["threads", "gevent"]

STOP_LIMIT_S = 5

#: Both stand beside the Python that runs this.
PROGRAMS: dict[Kind, str] = {"threads": "dramatiq", "gevent": "dramatiq-gevent"}


class DemoWorkers:
    """One worker of threads and one of greenlets, which run `commands.demo_actors`.

    Arguments:
      logs: the folder for what they print.
      interruption: is asked in all that takes its time.
    """

    def __init__(self, logs: Path, interruption: Interruption) -> None:
        self._logs = logs
        self._interruption = interruption
        self._groups: dict[Kind, ProcessGroup] = {}

    def start(self, kind: Kind) -> None:
        """Start one, or start it again, and return when it takes messages."""
        log = self._logs / kind
        # Through Python: the first line of a script finds none in a path with a space.
        command = [sys.executable, str(Path(sys.executable).with_name(PROGRAMS[kind]))]
        command += ["commands.demo_actors", "--processes", "1", "--threads", "4"]
        with log.open("wb") as output:
            self._groups[kind] = ProcessGroup(command, configuration.environment(), output)
        while b"ready for action" not in log.read_bytes():
            self.check()
            self._interruption.pause(0.05)

    def kill_in_mid_work(self, kind: Kind) -> int:
        """Send SIGKILL to one if it has deliveries in hand; returns how many it had.

        It is stopped for the look. If it happens to rest at that moment it goes on.
        """
        group = self._groups[kind]
        group.signal(signal.SIGSTOP)
        in_hand = self._count(f"started:{group.pid}") - self._count(f"ended:{group.pid}")
        if in_hand > 0:
            group.kill()
            del self._groups[kind]
        else:
            group.signal(signal.SIGCONT)
        return in_hand

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
                raise click.ClickException(f"The worker of {kind} ended.\n{self.last_words()}")

    def last_words(self) -> str:
        """The ends of their logs."""
        lines = []
        for log in sorted(self._logs.iterdir()):
            lines += [f"{log.name}:", *log.read_text(errors="replace").splitlines()[-20:]]
        return "\n".join(lines)

    def unfinished(self) -> int:
        """How many messages are in Redis: waiting, delayed or in a worker's hands."""
        from actors import broker, reserve_stock

        queue = f"{broker.namespace}:{reserve_stock.queue_name}"
        return sum(int(broker.client.hlen(f"{queue}{kind}.msgs")) for kind in ("", ".DQ"))

    def deliveries(self) -> int:
        """How many deliveries have begun."""
        from actors import broker

        from .demo_actors import COUNTS

        counts: Any = broker.client.hgetall(COUNTS)
        return sum(int(count) for name, count in counts.items() if name.startswith(b"started:"))

    def duplicates(self) -> int:
        """How many duplicates were answered."""
        return self._count("duplicates")

    def _count(self, name: str) -> int:
        from actors import broker

        from .demo_actors import COUNTS

        return int(broker.client.hget(COUNTS, name) or 0)

    def close(self) -> None:
        """End both, in good order if they manage that soon."""
        for group in self._groups.values():
            group.terminate()
        deadline = monotonic() + STOP_LIMIT_S
        while any(group.is_running for group in self._groups.values()) and monotonic() < deadline:
            sleep(0.05)
        for group in self._groups.values():
            group.kill()
