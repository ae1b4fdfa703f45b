"""PostgreSQL and Valkey from their wheels, for those who have no servers at hand.

    with temporary_folder() as folder, PostgreSQL(folder) as postgres, Valkey(folder) as valkey:
        print(postgres.url, valkey.url)

The servers listen where only this machine can reach them, keep everything in one folder and end
with the process that started them, however that one ends. Nothing outside the folder is changed:
no user is made, no permission widened. That is why the wheel's own `get_server` is not used (T19).
"""

from __future__ import annotations

from .folder import Folder, ServerError, kept_folder, temporary_folder
from .guard import Guard
from .postgresql import PostgreSQL
from .server import Mode, Server
from .valkey import Valkey

__all__ = [
    "Folder",
    "Guard",
    "Mode",
    "PostgreSQL",
    "Server",
    "ServerError",
    "Valkey",
    "kept_folder",
    "temporary_folder",
]
