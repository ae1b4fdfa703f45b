"""A proxy in front of a server that loses one answer: what was asked was done, nobody hears of it."""

from __future__ import annotations

import socket
from contextlib import suppress
from threading import Event, Thread
from typing import Self

Address = str | tuple[str, int]


class Proxy:
    """Hands bytes on between clients and one server, on Unix or TCP sockets.

    Arguments:
      server: the address of the server.
      own: where it listens itself; an address of the same kind.
    """

    def __init__(self, server: Address, own: Address) -> None:
        self.server = server
        self.lost = Event()
        self._marker: bytes | None = None
        self._sockets: list[socket.socket] = []
        self._listener = self._socket()
        self._listener.bind(own)
        self._listener.listen()

    @property
    def port(self) -> int:
        port: int = self._listener.getsockname()[1]
        return port

    def lose_answer_with(self, marker: bytes) -> None:
        """Do not deliver the next answer that contains `marker`, and hang up."""
        self.lost.clear()
        self._marker = marker

    def __enter__(self) -> Self:
        Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        for one in (self._listener, *self._sockets):
            _hang_up(one)

    def _socket(self) -> socket.socket:
        return socket.socket(socket.AF_UNIX if isinstance(self.server, str) else socket.AF_INET)

    def _accept(self) -> None:
        with suppress(OSError):  # the end of the test closes the listener
            while True:
                client, _ = self._listener.accept()
                server = self._socket()
                self._sockets += [client, server]
                server.connect(self.server)
                Thread(target=self._ask, args=(client, server), daemon=True).start()
                Thread(target=self._answer, args=(server, client), daemon=True).start()

    def _ask(self, client: socket.socket, server: socket.socket) -> None:
        with suppress(OSError):
            while data := client.recv(65_536):
                server.sendall(data)
        _hang_up(server)

    def _answer(self, server: socket.socket, client: socket.socket) -> None:
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
