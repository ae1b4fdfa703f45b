"""A proxy in front of Redis that loses an answer: what was asked was done, and nobody hears of it."""

from __future__ import annotations

import socket
from contextlib import suppress
from threading import Event, Thread
from typing import Self
from urllib.parse import urlsplit


class Proxy:
    """Hands bytes on between clients and the server of a redis:// URL."""

    def __init__(self, url: str) -> None:
        address = urlsplit(url)
        self._server = (address.hostname, address.port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._marker: bytes | None = None
        self.url = f"redis://127.0.0.1:{self._listener.getsockname()[1]}/0"
        #: Whether the answer was lost.
        self.lost = Event()

    def lose_answer_with(self, marker: bytes) -> None:
        """Do not deliver the next answer that contains `marker`, and hang up."""
        self.lost.clear()
        self._marker = marker

    def __enter__(self) -> Self:
        Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        _hang_up(self._listener)

    def _accept(self) -> None:
        with suppress(OSError):  # the end of the test closes the listener
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._server)
                Thread(target=self._ask, args=(client, server), daemon=True).start()
                Thread(target=self._answer, args=(client, server), daemon=True).start()

    def _ask(self, client: socket.socket, server: socket.socket) -> None:
        with suppress(OSError):
            while data := client.recv(65_536):
                server.sendall(data)
        _hang_up(server)

    def _answer(self, client: socket.socket, server: socket.socket) -> None:
        with suppress(OSError):
            while data := server.recv(65_536):
                if self._marker is not None and self._marker in data:
                    self._marker = None
                    self.lost.set()
                    break
                client.sendall(data)
        _hang_up(client)
        _hang_up(server)


def _hang_up(one: socket.socket) -> None:
    with suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
    one.close()
