"""A program and all that it starts, begun and ended as one."""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import IO

from embedded import Guard

PROJECT = Path(__file__).resolve().parent.parent


class ProcessGroup:
    """A process with a group of its own; the group is killed when we are gone.

    It is out of reach of the terminal's Ctrl-C, so that whoever started it decides when it ends.

    Arguments:
      command: the command line; a str goes through the shell.
      environment: all of its variables.
      output: where standard output and standard error go: a file, or PIPE.
    """

    def __init__(
        self, command: list[str] | str, environment: dict[str, str], output: IO[bytes] | int
    ) -> None:
        self.process: subprocess.Popen[bytes] = subprocess.Popen(
            command,
            shell=isinstance(command, str),
            cwd=PROJECT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.pid = self.process.pid
        self._guard = Guard(-self.pid, signal.SIGKILL)

    @property
    def is_running(self) -> bool:
        """Whether its first process runs; Dramatiq's workers outlive theirs."""
        return self.process.poll() is None

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the whole group, as far as it is there."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def terminate(self) -> None:
        """Ask the first process to end, and it alone.

        Dramatiq's workers would take a second SIGTERM, which their master sends them, for haste.
        """
        self.process.terminate()

    def kill(self) -> None:
        """End the whole group at once, if it is still there, and return when it has ended."""
        self.signal(signal.SIGKILL)
        self.process.wait()
        self._guard.release()

    def close(self) -> None:
        """Close the pipe of its output, if there is one."""
        if self.process.stdout is not None:
            self.process.stdout.close()
