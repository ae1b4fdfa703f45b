"""The workers of the tests of crashes and faults."""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING, Any

from tests.processes import WorkerProcess

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

MODULE = "tests.faults.actors:broker"


class Crew:
    """Starts workers of the actors under test; all are killed in the end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.workers: list[WorkerProcess] = []

    def start(
        self,
        *,
        ready: bool = True,
        heartbeat_ms: int = 5_000,
        env: Mapping[str, str] | None = None,
        module: str = MODULE,
        **arguments: Any,
    ) -> WorkerProcess:
        """Start one; it takes messages already if `ready`, else see `ready()`.

        A short heartbeat is for tests that wait for a sweep: a busy machine may make a living
        worker miss it.
        """
        worker = WorkerProcess(
            self.folder / f"worker-{len(self.workers) + 1}.log",
            module=module,
            env={"HEARTBEAT_TIMEOUT_MS": str(heartbeat_ms), **(env or {})},
            **arguments,
        )
        self.workers.append(worker)
        if ready:
            worker.ready()
        return worker

    def pair(self, **arguments: Any) -> tuple[WorkerProcess, WorkerProcess]:
        """Start two that are alike, side by side."""
        pair = self.start(ready=False, **arguments), self.start(ready=False, **arguments)
        self.ready()
        return pair

    def pair_of_kinds(self, **arguments: Any) -> tuple[WorkerProcess, WorkerProcess]:
        """Start one of threads and one of greenlets, side by side."""
        threads = self.start(ready=False, kind="threads", **arguments)
        greenlets = self.start(ready=False, kind="gevent", **arguments)
        self.ready()
        return threads, greenlets

    def ready(self) -> None:
        for worker in self.workers:
            if worker.returncode is None:
                worker.ready()

    def said(self, text: str) -> int:
        """How often the workers have logged a text."""
        return sum(worker.output().count(text) for worker in self.workers)

    def output(self) -> str:
        return "\n".join(worker.output() for worker in self.workers)

    def stop(self, deadline_s: float) -> None:
        """Ask all of them to stop, and wait until they have ended in good order."""
        for worker in self.workers:
            worker.terminate()
        deadline = monotonic() + deadline_s
        for worker in self.workers:
            assert worker.wait(max(0.0, deadline - monotonic())) == 0, worker.output()

    def kill(self) -> None:
        for worker in self.workers:
            worker.kill()
