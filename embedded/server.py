"""A server process: started, stopped, restarted, and ended with its owner."""

from __future__ import annotations

import os
import signal
import subprocess
from abc import ABC, abstractmethod
from contextlib import suppress
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from .folder import Folder, ServerError
from .guard import Guard

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

#: How a server is stopped: `fast` ends it in good order, `immediate` as a crash would.
Mode = Literal["fast", "immediate"]

START_LIMIT_S = 30
STOP_LIMIT_S = 20


class Server(ABC):
    """A server in a folder; a context manager that starts and stops it."""

    signals: ClassVar[dict[Mode, signal.Signals]]
    #: What its log says if a second attempt may succeed.
    passing_trouble: ClassVar[tuple[str, ...]]

    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        self.name = type(self).__name__
        self.home = folder.home(self.name.lower())
        self.log = self.home / "log"
        self._process: subprocess.Popen[bytes] | None = None
        self._guard: Guard | None = None

    @property
    def pid(self) -> int:
        """The id of its process.

        Raises:
          ServerError: it is not running.
        """
        if self._process is None or not self.is_running:
            raise ServerError(f"{self.name} is not running.")
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether its process is there."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start the server, unless it runs, and return when it answers.

        Raises:
          ServerError: it does not; the text ends with the last lines of its log.
        """
        if self.is_running:
            return
        self.stop()  # it may have ended by itself
        deadline = monotonic() + START_LIMIT_S
        try:
            while not self._attempt(deadline):
                tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-10:])
                passing = any(text in tail for text in self.passing_trouble)
                if not passing or monotonic() > deadline:
                    raise ServerError(f"{self.name} did not start. Its log ends with:\n{tail}")
                sleep(0.2)
        except BaseException:
            self.stop("immediate")
            raise

    def stop(self, mode: Mode = "fast") -> None:
        """Stop the server, if it runs, and return when it has ended."""
        if self._guard is not None:
            self._guard.release()
            self._guard = None
        if self._process is not None:
            self._process.send_signal(self.signals[mode])
            self._process.send_signal(signal.SIGCONT)  # it may have been paused
            try:
                self._process.wait(STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None

    def restart(self, mode: Mode = "fast") -> None:
        """Stop the server and start it again with the same data under the same address."""
        self.stop(mode)
        self.start()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop("fast" if self.folder.kept else "immediate")

    @property
    @abstractmethod
    def url(self) -> str:
        """How to connect to it; a restart does not change it."""

    @abstractmethod
    def prepare(self) -> list[str | Path]:
        """Make what the server needs, remove what a crash left; returns its command line."""

    @abstractmethod
    def answers(self) -> bool:
        """Whether the running process accepts clients."""

    def _attempt(self, deadline: float) -> bool:
        command = self.prepare()
        with self.log.open("wb") as log:
            self._process = self.spawn(command, stdout=log, stderr=log, pass_fds=self.folder.inherited)
        self._guard = Guard(self._process.pid, self.signals["fast"], **self.folder.account)
        while monotonic() < deadline:
            if self.answers():
                return True
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(0.05)
                break
        self.stop("immediate")
        return False

    def spawn(self, command: list[str | Path], **options: Any) -> subprocess.Popen[bytes]:
        """Start a process as the servers' account, out of reach of the terminal's Ctrl-C."""
        return subprocess.Popen(
            command,
            **options,
            **self.folder.account,
            stdin=subprocess.DEVNULL,
            cwd=self.home,
            env={"PATH": os.defpath, "LC_ALL": "C"},
            umask=0o077,
            start_new_session=True,
        )
