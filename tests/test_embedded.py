"""The embedded servers: what they keep, what they leave alone, and when they end (T19)."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from stat import S_IMODE
from textwrap import dedent
from typing import TYPE_CHECKING

import psutil
import psycopg2
import pytest
import redis

from embedded import PostgreSQL, ServerError, Valkey, kept_folder, temporary_folder

from .processes import eventually
from .servers import PROJECT, Servers

if TYPE_CHECKING:
    from collections.abc import Iterator

    from embedded.server import Mode

ROOT_ONLY = pytest.mark.skipif(os.geteuid() != 0, reason="only root runs them as another user")


def ask(url: str, query: str) -> object:
    with closing(psycopg2.connect(url)) as connection, connection, connection.cursor() as cursor:
        cursor.execute(query)
        row = cursor.fetchone() if cursor.description else None
        return row[0] if row else None


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Path]:
    """A project whose data folder, wherever it is, is deleted in the end."""
    yield tmp_path
    with kept_folder(tmp_path) as folder:
        shutil.rmtree(folder.path)


def owner(folder: Path, then: str) -> subprocess.Popen[str]:
    """A process that has the servers of a project and prints their process ids."""
    code = """
        import os, signal, sys
        from pathlib import Path
        from embedded import PostgreSQL, Valkey, kept_folder
        with kept_folder(Path(sys.argv[1])) as folder:
            with PostgreSQL(folder) as postgres, Valkey(folder) as valkey:
                print(postgres.pid, valkey.pid, flush=True)
                THEN
    """
    return subprocess.Popen(
        [sys.executable, "-c", dedent(code).replace("THEN", then), str(folder)],
        cwd=PROJECT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("mode", ["fast", "immediate"])
def test_a_restart_keeps_data_and_addresses(servers: Servers, mode: Mode) -> None:
    # Given a row and a key
    addresses = servers.postgres.url, servers.redis.url
    ask(addresses[0], "CREATE TABLE kept AS SELECT 1 AS x")
    with redis.Redis.from_url(addresses[1]) as client:
        client.set("kept", 1)

    # When both servers are restarted
    servers.postgres.restart(mode)
    servers.redis.restart(mode)

    # Then both are found where they were
    assert (servers.postgres.url, servers.redis.url) == addresses
    assert ask(addresses[0], "SELECT x FROM kept") == 1
    ask(addresses[0], "DROP TABLE kept")
    with redis.Redis.from_url(addresses[1]) as client:
        assert client.get("kept") == b"1"


@pytest.mark.parametrize("setting", ["fsync", "synchronous_commit", "full_page_writes"])
def test_postgresql_is_as_durable_as_it_is_by_default(servers: Servers, setting: str) -> None:
    assert ask(servers.postgres.url, f"SHOW {setting}") == "on"


def test_a_temporary_folder_disappears_and_nothing_of_it_runs_on() -> None:
    # Given both servers in a temporary folder
    with temporary_folder() as folder:
        with PostgreSQL(folder) as postgres, Valkey(folder) as valkey:
            pids = [postgres.pid, valkey.pid]
        # When they were left, then they have ended
        assert not any(psutil.pid_exists(pid) for pid in pids)

    # And the folder is gone
    assert not folder.path.exists()


def test_any_path_will_do_and_no_permission_outside_the_folder_changes(tmp_path: Path) -> None:
    # Given a project in a long path with spaces, behind a folder that is closed to others
    closed = tmp_path / "closed"
    project = closed / ("a long path " * 10).strip() / 'and "quotes"'
    project.mkdir(parents=True)
    closed.chmod(0o700)
    above = [project, *project.parents]
    modes = [S_IMODE(path.stat().st_mode) for path in above]

    # When the servers run for it
    with kept_folder(project) as folder, PostgreSQL(folder) as postgres, Valkey(folder):
        # Then they do
        assert ask(postgres.url, "SELECT 1") == 1

    # And the folders above have the modes that they had
    assert [S_IMODE(path.stat().st_mode) for path in above] == modes
    shutil.rmtree(folder.path)


@ROOT_ONLY
def test_wheels_behind_a_closed_folder_are_copied(tmp_path: Path) -> None:
    # Given wheels that only root can reach
    tmp_path.chmod(0o700)
    (tmp_path / "site").symlink_to(Path(psycopg2.__file__).parent.parent)

    # When a process starts the servers out of them
    code = """
        from embedded import PostgreSQL, Valkey, temporary_folder
        with temporary_folder() as folder, PostgreSQL(folder) as postgres, Valkey(folder) as valkey:
            for server in (postgres, valkey):
                assert folder.path in server.prepare()[0].parents, server.prepare()
            print("both run")
    """
    done = subprocess.run(
        [sys.executable, "-c", dedent(code)],
        cwd=PROJECT,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
        check=False,
    )

    # Then they run from copies
    assert done.stdout == "both run\n", done.stderr


def test_what_a_crash_left_behind_does_not_hinder_the_next_start() -> None:
    # Given a data folder with the lock file of a server that is gone, whose number somebody has
    with temporary_folder() as folder:
        with PostgreSQL(folder) as postgres:
            left = (postgres.data / "postmaster.pid").read_text()
        number = left.splitlines()[0]
        (postgres.data / "postmaster.pid").write_text(left.replace(number, f"{os.getpid()}", 1))

        # When the server starts again, then it does
        with PostgreSQL(folder) as postgres:
            assert ask(postgres.url, "SELECT 1") == 1


def test_servers_end_with_an_owner_that_was_killed_and_free_their_folder(project: Path) -> None:
    # Given the servers of another process
    first = owner(project, "os.kill(os.getpid(), signal.SIGKILL)")
    assert first.stdout is not None

    # When that process is killed
    output, _ = first.communicate()
    pids = [int(pid) for pid in output.split()]
    assert first.returncode == -signal.SIGKILL

    # Then the next owner gets them, though they may still be ending
    second = owner(project, "sys.stdin.read()")
    assert second.stdout is not None
    assert second.stdout.readline().split()

    # And the first one's have ended
    eventually(lambda: not any(is_running(pid) for pid in pids))
    second.communicate()
    assert second.returncode == 0


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_folder_in_use_is_refused_with_the_number_of_its_owner(project: Path) -> None:
    # Given a folder that this process has
    # When somebody else wants it, then the error says who has it
    with (
        kept_folder(project),
        pytest.raises(ServerError, match=f"Process {os.getpid()} uses"),
        kept_folder(project),
    ):
        pass

    # And it is free afterwards
    with kept_folder(project):
        pass


def test_a_port_that_was_taken_meanwhile_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a port that is free when it is looked for and taken when Valkey starts
    with socket.socket() as rival:
        rival.bind(("127.0.0.1", 0))
        rival.listen()
        free_port = Valkey.prepare.__globals__["_free_port"]
        answers = iter([rival.getsockname()[1]])
        monkeypatch.setattr("embedded.valkey._free_port", lambda: next(answers, None) or free_port())

        # When it is started, then it takes another
        with temporary_folder() as folder, Valkey(folder) as valkey:
            assert redis.Redis.from_url(valkey.url).ping()
