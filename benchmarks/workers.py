"""The processes of a benchmark: two workers of four threads each, and a relay."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

REPOSITORY = Path(__file__).parent.parent

#: How long workers may take to stop before they are killed, in seconds.
STOP_DEADLINE_S = 20


@contextmanager
def workers(module: str, environment: Mapping[str, str], log: Path) -> Iterator[psutil.Popen]:
    """Dramatiq's workers for a module; they are stopped at the end, whatever happens.

    Arguments:
      module: the module to start `dramatiq` with.
      environment: the whole environment of the processes.
      log: the file that takes what they print.

    Returns:
      The master process, whose children do the work.
    """
    options = ("--processes", "2", "--threads", "4")
    with process(["-m", "dramatiq", module, *options], environment, log) as master:
        yield master


@contextmanager
def relay(environment: Mapping[str, str], log: Path) -> Iterator[psutil.Popen]:
    """A relay that is at work; it is stopped at the end. Arguments as for `workers`."""
    with process(["manage.py", "relay"], environment, log) as master:
        deadline = time.monotonic() + STOP_DEADLINE_S
        while "relay is at work" not in log.read_text():
            if master.poll() is not None or time.monotonic() > deadline:
                raise TimeoutError(f"The relay did not start. It printed:\n{log.read_text()[-4_000:]}")
            time.sleep(0.05)
        yield master


@contextmanager
def process(arguments: list[str], environment: Mapping[str, str], log: Path) -> Iterator[psutil.Popen]:
    """Python with some arguments, in a process that is stopped at the end, whatever happens."""
    command = [sys.executable, *arguments]
    with log.open("wb") as output:
        # A session of its own: Ctrl-C reaches the benchmark, which then stops it in order.
        master = psutil.Popen(
            command,
            cwd=REPOSITORY,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield master
    finally:
        _stop(master)


def _stop(master: psutil.Popen) -> None:
    try:
        master.terminate()
        master.wait(STOP_DEADLINE_S)
    except (psutil.NoSuchProcess, psutil.TimeoutExpired):
        pass
    finally:  # also where a second Ctrl-C cuts the wait short
        with suppress(ProcessLookupError):
            os.killpg(master.pid, signal.SIGKILL)
        master.wait()


def cpu_s(root: psutil.Process) -> float:
    """The CPU time in seconds of a process and all below it, also of children that have ended."""
    times = root.cpu_times()
    spent = float(times.user + times.system + times.children_user + times.children_system)
    for process in root.children(recursive=True):
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:  # it has just ended: its parent counts it from now on
            continue
        spent += times.user + times.system
    return spent
