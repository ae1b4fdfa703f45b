"""Signals between a test and the processes under test: files, which need no server that runs."""

from __future__ import annotations

import os
from pathlib import Path
from time import sleep

#: Tells the processes under test where the signals are.
VARIABLE = "FAULTS_FOLDER"


class Signals:
    """Named signals that are set or not, and notes; shared by all processes of a test run."""

    @property
    def folder(self) -> Path:
        return Path(os.environ[VARIABLE])

    def set(self, name: str) -> None:
        (self.folder / name).touch()

    def clear(self, name: str) -> None:
        (self.folder / name).unlink(missing_ok=True)

    def is_set(self, name: str) -> bool:
        return (self.folder / name).exists()

    def take(self, name: str) -> bool:
        """Clear a signal; True for the one taker that found it set."""
        try:
            (self.folder / name).unlink()
        except FileNotFoundError:
            return False
        return True

    def hold(self, name: str) -> None:
        """Stay as long as a signal is set. Short sleeps, so that an interrupt gets through."""
        while self.is_set(name):
            sleep(0.01)

    def note(self, name: str, line: str) -> None:
        """Add a line, in one write, so that the lines of several processes do not mix."""
        with (self.folder / name).open("ab", buffering=0) as file:
            file.write(f"{line}\n".encode())

    def notes(self, name: str) -> list[str]:
        try:
            return (self.folder / name).read_text().splitlines()
        except FileNotFoundError:
            return []

    def forget(self) -> None:
        """Clear all signals; whoever holds goes on."""
        for path in self.folder.iterdir():
            path.unlink(missing_ok=True)


signals = Signals()
