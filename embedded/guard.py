"""Ends a process when the one that started it is gone, however that one went."""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import signal

#: The pipe on standard input closes when its other end is in nobody's hands any more.
SCRIPT = 'read _; kill -s "$1" -- "$2"'


class Guard:
    """A tiny process that outlives us and then sends one signal.

    Not prctl's parent-death signal: that one comes as soon as the *thread* that started the child
    ends, and only Linux has it.

    Arguments:
      target: the process to end; a negative number means the group of that process.
      number: the signal that it gets.
      account: the arguments of Popen that make the guard run as the owner of the target.
    """

    def __init__(self, target: int, number: signal.Signals, **account: Any) -> None:
        name = number.name.removeprefix("SIG")
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", SCRIPT, "guard", name, str(target)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env={"PATH": os.defpath},
            start_new_session=True,
            **account,
        )

    def release(self) -> None:
        """Let the target live on, or end as its owner pleases."""
        self._process.kill()
        self._process.communicate()
