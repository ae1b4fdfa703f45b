"""`manage.py up`: everything of the Procfile in the foreground; what dies is started again.

Dramatiq's master ends all its workers when one of them is killed, and honcho ends all processes
when one has ended. Neither starts anything again, so this does (T28).
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from datetime import datetime
from select import select
from time import monotonic
from typing import TYPE_CHECKING

from honcho.colour import get_colours
from honcho.environ import parse_procfile
from honcho.printer import Message, Printer

import settings
from embedded import Server, kept_folder

from . import configuration
from .interruption import Interruption
from .process import PROJECT, ProcessGroup

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

#: The pause before a process is started again doubles each time that it lived for less than this.
SHORT_LIFE_S = 10
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30

#: A worker has this long to finish what it has in hand.
STOP_LIMIT_S = 20


class Entry:
    """One line of the Procfile and the process that runs for it.

    Arguments:
      name: what stands before the colon.
      command: what stands behind it; the shell reads it.
      say: prints a line with the name in front.
    """

    def __init__(self, name: str, command: str, say: Callable[[str, bytes | str], None]) -> None:
        self.name = name
        self._command = command
        self._say = say
        self._group: ProcessGroup | None = None
        self._pause_s = FIRST_PAUSE_S
        self._born = 0.0
        self._due = 0.0
        self._rest = b""

    @property
    def is_alive(self) -> bool:
        return self._group is not None

    def start_if_due(self) -> None:
        """Start the process, unless it runs or has to wait because it died so soon."""
        if self._group is None and monotonic() >= self._due:
            # In place of the shell, so that a signal reaches the program; `env` takes what may
            # stand in front of it, as in `NAME=value program`.
            command = f"exec env {self._command}"
            self._group = ProcessGroup(command, configuration.environment(), subprocess.PIPE)
            self._born = monotonic()
            os.set_blocking(self.fileno(), False)

    def fileno(self) -> int:
        """What a selector waits for: the process has written something."""
        assert self._group is not None
        assert self._group.process.stdout is not None
        return self._group.process.stdout.fileno()

    def pass_on(self) -> None:
        """Print what the process has written, as far as the lines are complete."""
        with suppress(BlockingIOError):
            while data := os.read(self.fileno(), 65_536):
                *lines, self._rest = (self._rest + data).split(b"\n")
                for line in lines:
                    self._say(self.name, line)

    def notice_death(self, *, is_wanted: bool) -> None:
        """If the process has ended, clear away what it left and plan the next one."""
        if self._group is None or self._group.is_running:
            return
        self._group.kill()  # Dramatiq's workers outlive a master that was killed
        self.pass_on()
        code = self._group.process.returncode
        self._group.close()
        self._group = None
        if is_wanted:
            self._say(self.name, f"has stopped with code {code}")
            return
        if monotonic() - self._born >= SHORT_LIFE_S:
            self._pause_s = FIRST_PAUSE_S
        self._say(self.name, f"ended with code {code} and starts again in {self._pause_s:g} s")
        self._due = monotonic() + self._pause_s
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)

    def terminate(self) -> None:
        """Ask the process to end."""
        if self._group is not None:
            self._group.terminate()

    def kill(self) -> None:
        """End the process at once, if it is there."""
        if self._group is not None:
            self._group.kill()
            self._group.close()
            self._group = None


class Supervisor:
    """Runs entries and servers until a signal comes, and stops them in good order.

    Arguments:
      processes: the commands of the Procfile by their names.
      servers: the embedded servers, which are kept running too.
      interruption: tells of signals; a second one hurries.
    """

    def __init__(
        self, processes: Mapping[str, str], servers: list[Server], interruption: Interruption
    ) -> None:
        self._servers = servers
        self._interruption = interruption
        self._printer = Printer(sys.stdout, width=max(len(name) for name in (*processes, "up")))
        self._colours = dict(zip(processes, get_colours(), strict=False))
        self._entries = [Entry(name, command, self.say) for name, command in processes.items()]

    def say(self, name: str, text: bytes | str) -> None:
        """Print a line with a name in front."""
        now = datetime.now()  # noqa: DTZ005 - the clock on the wall, for whoever watches
        self._printer.write(Message("line", text or " ", now, name, self._colours.get(name)))

    def run(self) -> None:
        """Start all, start again what dies, and stop all when a signal comes."""
        try:
            while not self._interruption.times:
                self._start()
                self._turn(is_wanted=False)
            self.say("up", "stops; once more and it will not wait for the work in hand")
            for entry in self._entries:
                entry.terminate()
            deadline = monotonic() + STOP_LIMIT_S
            while self._living() and self._interruption.times < 2 and monotonic() < deadline:
                self._turn(is_wanted=True)
        finally:
            for entry in self._entries:
                entry.kill()

    def _living(self) -> list[Entry]:
        return [entry for entry in self._entries if entry.is_alive]

    def _start(self) -> None:
        for server in self._servers:
            if not server.is_running:
                self.say("up", f"{server.name} has ended and starts again")
                server.start()
        for entry in self._entries:
            entry.start_if_due()

    def _turn(self, *, is_wanted: bool) -> None:
        """Pass on what the processes write, for a moment, and see who has ended."""
        readable, _, _ = select(self._living(), [], [], 0.1)
        for entry in readable:
            entry.pass_on()
        for entry in self._entries:
            entry.notice_death(is_wanted=is_wanted)


def up() -> None:
    """Run the application until a signal comes, and leave nothing running.

    Raises:
      InterruptedBySignal: a signal came, which is how it ends.
      ServerError: an embedded server cannot run.
    """
    procfile = parse_procfile((PROJECT / "Procfile").read_text())
    with Interruption() as interruption, configuration.servers(kept_folder(PROJECT)) as servers:
        from models import database, load_sample_data, migrate

        migrate()
        load_sample_data()
        database.close()
        supervisor = Supervisor(procfile.processes, servers, interruption)
        for server in servers:
            supervisor.say("up", f"{server.name} is at {server.url}, its data in {server.home}")
        supervisor.say("up", f"http://127.0.0.1:{settings.PORT} is the application; Ctrl-C stops it")
        supervisor.run()
        interruption.check()
