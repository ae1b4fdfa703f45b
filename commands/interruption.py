"""Ctrl-C and SIGTERM as something to ask for, so that no work is torn in two."""

from __future__ import annotations

import signal
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from types import FrameType, TracebackType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class InterruptedBySignal(Exception):  # noqa: N818 - no error: somebody wants us to end
    """A signal asked the command to end.

    Attributes:
      exit_code: what a shell expects of a process that a signal ended.
    """

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number


class Interruption:
    """While it is entered, signals are noted and interrupt nothing.

    An exception that a signal raises anywhere could fall between the start of a process and the
    line that remembers it. So the command asks, where it can stop.

    Attributes:
      times: how often a signal came.
    """

    def __init__(self) -> None:
        self.times = 0
        self._number = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for number in SIGNALS:
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.times += 1
        self._number = number

    def check(self) -> None:
        """Go on, unless a signal came.

        Raises:
          InterruptedBySignal: one did.
        """
        if self.times:
            raise InterruptedBySignal(self._number)

    def pause(self, seconds: float) -> None:
        """Sleep, and notice a signal soon.

        Raises:
          InterruptedBySignal: one came.
        """
        end = monotonic() + seconds
        while (left := end - monotonic()) > 0:
            self.check()
            sleep(min(left, 0.1))
        self.check()
