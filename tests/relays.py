"""Relays as processes of their own beside a stage, and the ways to disturb them."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from threading import Event
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import psutil
from dramatiq import Message

from embedded import Valkey

from .faults.proxy import Proxy
from .processes import eventually
from .servers import PROJECT
from .stage import NAMESPACE

if TYPE_CHECKING:
    import signal
    import socket
    from pathlib import Path

    from dramatiq import Actor

    from .ledger_stage import LedgerStage


def send_many(ledger: LedgerStage, actor: Actor[..., Any], count: int, load: str = "") -> list[str]:
    """Send so many messages in one transaction; returns their ids, the first one first."""
    with ledger.database.atomic():
        return [actor.send(str(number), load).message_id for number in range(count)]


def in_queue(ledger: LedgerStage, queue: str = "default") -> list[str]:
    """The ids of the messages that wait in a queue, in the order in which they are fetched."""
    client: Any = ledger.redis
    name = f"{NAMESPACE}:{queue}"
    return [
        Message.decode(client.hget(f"{name}.msgs", redis_id)).message_id
        for redis_id in client.lrange(name, 0, -1)
    ]


class RelayProcess:
    """`python -m middleware relay` on the tables of a stage, running when it was made.

    Arguments:
      stage: whose ledger it looks after.
      log: the file that its output goes to.
      name: what PostgreSQL calls its session.
      postgres, redis: how it gets to the servers, if not directly.
      env: more variables.
    """

    def __init__(
        self,
        stage: LedgerStage,
        log: Path,
        name: str,
        *,
        postgres: str | None = None,
        redis: str | None = None,
        env: dict[str, str] | None = None,
    ) -> None:
        self.stage, self.log, self.name = stage, log, name
        variables = {
            "DATABASE_URL": f"{stage.url(address=postgres)}&application_name={name}",
            "REDIS_URL": redis or stage.servers.redis.url,
        }
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "middleware", "relay", "--broker", "tests.relay_broker"],
                cwd=PROJECT,
                env={**os.environ, **variables, **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        eventually(lambda: self.returncode is not None or self.sessions(), 30, what=self.output)
        assert self.returncode is None, self.output()

    @property
    def returncode(self) -> int | None:
        """None as long as it runs."""
        return self._process.poll()

    def output(self) -> str:
        """All that it has printed so far."""
        return self.log.read_text(errors="replace")

    def sessions(self, condition: str = "true") -> int:
        """How many sessions of PostgreSQL it has for which a condition holds."""
        query = f"SELECT count(*) FROM pg_stat_activity WHERE application_name = %s AND {condition}"
        return int(self.stage.sql(query, self.name)[0][0])

    def cpu_s(self) -> float:
        """How much of a core it has used so far, in seconds."""
        times = psutil.Process(self._process.pid).cpu_times()
        return float(times.user + times.system)

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def wait(self, deadline_s: float = 15) -> int:
        """Wait until it has ended; returns its exit code."""
        return self._process.wait(deadline_s)

    def kill(self) -> None:
        """End it with SIGKILL, also while it is stopped, and reap it."""
        self._process.kill()
        self._process.wait()


class HoldingProxy(Proxy):
    """A way to a server on which a question, or the rest of an answer, can be held up.

    Arguments:
      url: of a server that listens on a port of this machine.
    """

    def __init__(self, url: str) -> None:
        super().__init__(url)
        #: Something is being held up.
        self.held = Event()
        self._released = Event()
        self._held_marker: bytes | None = None
        #: A connection that is made from now on gets so many bytes of answers, and the rest never.
        self.answer_limit_bytes: int | None = None

    @property
    def port(self) -> int:
        return urlsplit(self.url).port or 0

    def hold_question_with(self, marker: bytes) -> None:
        """Keep back the next question that contains `marker`; one that is never released is lost."""
        self.held.clear()
        self._released.clear()
        self._held_marker = marker

    def release(self) -> None:
        """Pass on what was held."""
        self._released.set()

    def _ask(self, client: socket.socket, server: socket.socket) -> None:
        with suppress(OSError):
            while data := client.recv(65_536):
                if self._held_marker is not None and self._held_marker in data:
                    self._held_marker = None
                    self.held.set()
                    if not self._released.wait(60):
                        break
                server.sendall(data)
        super()._ask(client, server)

    def _answer(self, client: socket.socket, server: socket.socket) -> None:
        rest = self.answer_limit_bytes
        with suppress(OSError):
            while rest and (data := server.recv(min(rest, 65_536))):
                rest -= len(data)
                client.sendall(data)
            if rest == 0:
                self.held.set()
                self._released.wait(60)
        super()._answer(client, server)


class ForgetfulValkey(Valkey):
    """Writes nothing down by itself: it comes back empty, or as it was at its last SAVE."""

    #: More of the server's options, from its next start on.
    options: tuple[str, ...] = ()

    def prepare(self) -> list[str | Path]:
        return [*super().prepare(), "--appendonly", "no", *self.options]

    def crash(self) -> None:
        """End at once, as the machine's failure would, and start again."""
        self.restart("immediate")
