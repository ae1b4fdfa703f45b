"""A way to PostgreSQL on which a message of the protocol can get lost."""

from __future__ import annotations

import select
import socket
from contextlib import suppress
from threading import Thread
from typing import TYPE_CHECKING, Literal, Self
from urllib.parse import parse_qs, urlsplit

if TYPE_CHECKING:
    from types import TracebackType

Lost = Literal["question", "answer"]


class LossyProxy:
    """Listens on loopback and passes everything on to the server, until something shall get lost.

    Arguments:
      url: of the server, which listens on a Unix socket.
    """

    def __init__(self, url: str) -> None:
        (folder,) = parse_qs(urlsplit(url).query)["host"]
        self._server = f"{folder}/.s.PGSQL.5432"
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._lose: tuple[Lost, bytes] | None = None
        #: How often something got lost.
        self.losses = 0

    @property
    def address(self) -> str:
        """How to connect to it; more parameters may follow."""
        return f"postgresql://postgres@127.0.0.1:{self._listener.getsockname()[1]}/postgres?sslmode=disable"

    def lose(self, what: Lost, statement: str) -> None:
        """Break the next connection that sends this statement, before or after the server has it."""
        self._lose = (what, statement.encode())

    def __enter__(self) -> Self:
        Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with suppress(OSError):  # wakes the thread that accepts
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                Thread(target=self._pass_on, args=(client,), daemon=True).start()

    def _pass_on(self, client: socket.socket) -> None:
        with client, socket.socket(socket.AF_UNIX) as server, suppress(OSError):
            server.connect(self._server)
            lost: Lost | None = None
            while True:
                ready, _, _ = select.select([client, server], [], [])
                if client in ready:
                    sent = client.recv(65_536)
                    lost = self._lost(sent)
                    if not sent or lost == "question":
                        return
                    server.sendall(sent)
                if server in ready:
                    answer = server.recv(65_536)
                    if not answer or lost == "answer":
                        return
                    client.sendall(answer)

    def _lost(self, sent: bytes) -> Lost | None:
        if self._lose is None or self._lose[1] not in sent:
            return None
        what, self._lose = self._lose[0], None
        self.losses += 1
        return what
