"""Worker processes for tests, and how to wait for what they do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep
from typing import TYPE_CHECKING, Literal, TypeVar

import psutil

from .servers import PROJECT

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

Kind = Literal["threads", "gevent"]
T = TypeVar("T")

#: Both are in the virtual environment that runs the tests.
PROGRAMS: dict[Kind, str] = {"threads": "dramatiq", "gevent": "dramatiq-gevent"}


class WorkerProcess:
    """`dramatiq MODULE` or `dramatiq-gevent MODULE` in a process group of its own.

    Arguments:
      log: the file that its output goes to.
      kind: threads or greenlets.
      module: what it imports; the project's folder is on its path.
      processes, threads: how many, as Dramatiq's options.
      env: variables that differ from ours; None removes one.
      options: more of Dramatiq's options.
    """

    def __init__(
        self,
        log: Path,
        *,
        kind: Kind = "threads",
        module: str = "actors",
        processes: int = 1,
        threads: int = 4,
        env: Mapping[str, str | None] | None = None,
        options: tuple[str, ...] = (),
    ) -> None:
        self.log = log
        self.processes = processes
        variables: dict[str, str | None] = {**os.environ, **(env or {})}
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [
                    # Its first line does not find a Python in a path with a space.
                    sys.executable,
                    str(Path(sys.executable).with_name(PROGRAMS[kind])),
                    module,
                    *("--processes", str(processes)),
                    *("--threads", str(threads)),
                    *options,
                ],
                cwd=PROJECT,
                env={name: value for name, value in variables.items() if value is not None},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Dramatiq's master process, which is the leader of the group."""
        return self._process.pid

    @property
    def children(self) -> list[psutil.Process]:
        """The processes that the master has started."""
        return psutil.Process(self.pid).children(recursive=True)

    @property
    def returncode(self) -> int | None:
        """None as long as the master runs."""
        return self._process.poll()

    def output(self) -> str:
        """All that it has printed so far."""
        return self.log.read_text(errors="replace")

    def ready(self, deadline_s: float = 30) -> None:
        """Wait until each of its processes takes messages."""
        eventually(
            lambda: self.returncode is not None or self.output().count("ready for action") >= self.processes,
            deadline_s,
            what=self.output,
        )
        assert self.returncode is None, f"The worker ended:\n{self.output()}"

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the whole group, for example SIGSTOP and SIGCONT."""
        os.killpg(self.pid, number)

    def terminate(self) -> None:
        """Ask the master to stop, as a process manager does."""
        self._process.terminate()

    def wait(self, deadline_s: float = 30) -> int:
        """Wait until the master has ended; returns its exit code."""
        return self._process.wait(deadline_s)

    def kill(self) -> None:
        """End the whole group with SIGKILL, as the machine's failure would, and reap it."""
        with suppress(ProcessLookupError):  # it has ended already
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()


def eventually(
    predicate: Callable[[], T],
    deadline_s: float = 10,
    *,
    what: Callable[[], object] | str = "",
) -> T:
    """Ask until the answer is true, and return it.

    Raises:
      AssertionError: it was not by the deadline; the text holds `what`, asked at that moment.
    """
    deadline = monotonic() + deadline_s
    while not (answer := predicate()):
        if monotonic() > deadline:
            seen = what() if callable(what) else what
            raise AssertionError(f"Not within {deadline_s} s: {seen or predicate}")
        sleep(0.02)
    return answer
