"""The command line: what its commands do, what they say when they cannot, what they leave."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import psutil
import psycopg2
import pytest
import redis

from embedded import kept_folder

from .processes import eventually
from .servers import PROJECT, Servers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

IGNORED = shutil.ignore_patterns(".*", "tests", "benchmarks", "docs")


class Command:
    """`python manage.py ...` in a process of its own, which writes into a file."""

    def __init__(self, log: Path, *arguments: str, project: Path = PROJECT, **env: str) -> None:
        self.log = log
        with log.open("wb") as output:
            self.process = psutil.Popen(
                [sys.executable, "manage.py", *arguments],
                cwd=project,
                env={**os.environ, **env},
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_for(self, text: str, deadline_s: float = 30) -> None:
        """Wait until it has printed something."""
        eventually(
            lambda: text in self.output() or self.process.poll() is not None,
            deadline_s,
            what=self.output,
        )
        assert text in self.output(), self.output()

    def family(self) -> list[psutil.Process]:
        """All processes that it has started so far."""
        return list(self.process.children(recursive=True))

    def end(self, number: signal.Signals, deadline_s: float = 30) -> int:
        """Send a signal as a terminal does, and wait; returns the exit code."""
        os.killpg(self.process.pid, number)
        return int(self.process.wait(deadline_s))


@pytest.fixture
def manage(tmp_path: Path) -> Iterator[Callable[..., Command]]:
    """Starts commands, and ends those that a failed test leaves running."""
    started: list[Command] = []

    def start(*arguments: str, project: Path = PROJECT, **env: str) -> Command:
        log = tmp_path / f"manage-{len(started)}.log"
        started.append(Command(log, *arguments, project=project, **env))
        return started[-1]

    yield start
    for command in started:
        if command.process.poll() is None:
            command.process.kill()  # what it has started ends with it
            command.process.wait()


@pytest.fixture
def copy(tmp_path: Path) -> Iterator[Path]:
    """A copy of the project, so that its data are not those of this checkout."""
    project = tmp_path / "another checkout"
    shutil.copytree(PROJECT, project, ignore=IGNORED)
    yield project
    with kept_folder(project) as folder:
        shutil.rmtree(folder.path)


def run(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "manage.py", *arguments],
        cwd=PROJECT,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=False,
    )


def running(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def schemas(servers: Servers) -> set[str]:
    with closing(psycopg2.connect(servers.postgres.url)) as connection:
        cursor = connection.cursor()
        cursor.execute("SELECT nspname FROM pg_namespace WHERE nspname !~ '^pg_'")
        return {name for (name,) in cursor.fetchall()}


def test_several_migrations_at_once_do_no_harm(clean: Servers, manage: Callable[..., Command]) -> None:
    # Given an empty schema
    with closing(psycopg2.connect(clean.postgres.url)) as connection, connection:
        connection.cursor().execute("CREATE SCHEMA empty")
    url = f"{clean.postgres.url}&options=-csearch_path%3Dempty"

    # When it is migrated three times at once, and once more
    commands = [manage("migrate", DATABASE_URL=url) for _ in range(3)]
    codes = [command.process.wait(30) for command in commands]
    again = run("migrate", DATABASE_URL=url)

    # Then one has done it, and nobody has failed
    outputs = sorted(command.output() for command in commands)
    assert codes == [0, 0, 0]
    assert sum("Applied" in output for output in outputs) == 1
    assert again.stdout == "The tables are up to date.\n"
    with closing(psycopg2.connect(clean.postgres.url)) as connection, connection:
        connection.cursor().execute("DROP SCHEMA empty CASCADE")


def test_sample_data_can_be_loaded_again(clean: Servers) -> None:
    assert run("sample-data").stdout == "Added 10 articles.\n"
    assert run("sample-data").stdout == "Added 0 articles.\n"


@pytest.mark.parametrize(
    ("env", "sentence"),
    [
        ({"LOCK_TIMEOUT_MS": "soon"}, r"LOCK_TIMEOUT_MS is 'soon'; .* for example 2000"),
        ({"DATABASE_URL": "postgresql://127.0.0.1:1/x"}, r"refused[^$]*DATABASE_URL right"),
        ({"DATABASE_URL": "postgresql://[::1/x"}, r"DATABASE_URL is no URL that can be read"),
        ({"REDIS_URL": "redis://localhost:abc/0"}, r"REDIS_URL is no URL that can be read"),
    ],
)
def test_what_cannot_work_is_a_sentence(env: dict[str, str], sentence: str) -> None:
    done = run("migrate", **env)
    assert done.returncode == 1
    assert re.search(sentence, done.stderr), done.stderr
    assert "Traceback" not in done.stderr


def test_the_relay_ends_in_good_order(clean: Servers, manage: Callable[..., Command]) -> None:
    # Given a relay
    relay = manage("relay")
    relay.wait_for("The relay is at work")

    # When it is asked to end, then it does
    assert relay.end(signal.SIGTERM) == 0


def test_the_demo_without_redis_is_a_sentence_and_leaves_no_schema(servers: Servers) -> None:
    before = schemas(servers)
    done = run("demo", REDIS_URL="redis://127.0.0.1:1/0")
    assert done.returncode == 1
    assert "REDIS_URL right" in done.stderr
    assert "Traceback" not in done.stderr
    assert schemas(servers) == before


def test_the_demo_is_exact_and_deletes_only_its_own(clean: Servers) -> None:
    # Given configured servers with somebody's data
    before = schemas(clean)
    with redis.Redis.from_url(clean.redis.url) as client:
        client.set("somebody's", 1)

        # When the demo runs
        done = run("demo", REDIS_NAMESPACE="theirs")

        # Then every message took effect once, and nothing is owed
        assert done.returncode == 0, done.stdout + done.stderr
        for what, number in (
            *(("orders shipped", 264), ("charges", 270), ("charges refunded", 6), ("shipments", 264)),
            *(("notifications", 300), ("effects", 1176), ("still owed", 0)),
        ):
            assert re.search(rf"{what} +. +{number} +. +{number} ", done.stdout), done.stdout
        assert "Every message took effect once." in done.stdout

        # And what was there before is what there is
        assert client.keys() == [b"somebody's"]
        assert schemas(clean) == before


@pytest.mark.parametrize(
    ("moment", "number"),
    [("starting", signal.SIGINT), ("delivering", signal.SIGTERM)],
)
def test_an_interrupted_demo_leaves_nothing(
    manage: Callable[..., Command], tmp_path: Path, moment: str, number: signal.Signals
) -> None:
    # Given a demo with servers of its own, at some moment
    folder = tmp_path / "temporary files"
    folder.mkdir()
    demo = manage("demo", DATABASE_URL="", REDIS_URL="", TMPDIR=str(folder), FORCE_COLOR="1", COLUMNS="120")
    demo.wait_for(moment)
    family = demo.family()

    # When it is interrupted
    code = demo.end(number)

    # Then it says so, and neither a process nor a file is left
    assert code == 128 + number, demo.output()
    assert "Ended by" in demo.output()
    assert running(family) == []
    assert list(folder.iterdir()) == []


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder for temporary files that servers of another user can reach; removed with what is in it."""
    with tempfile.TemporaryDirectory(prefix="onetake-test-", ignore_cleanup_errors=True) as name:
        Path(name).chmod(0o755)
        yield Path(name)


def test_a_killed_demo_takes_its_servers_and_workers_along(
    manage: Callable[..., Command], open_folder: Path
) -> None:
    # Given a demo that delivers
    places = {"DATABASE_URL": "", "REDIS_URL": "", "TMPDIR": f"{open_folder}"}
    demo = manage("demo", **places, FORCE_COLOR="1", COLUMNS="120")
    demo.wait_for("delivering")
    family = demo.family()
    assert len(running(family)) > 4

    # When it is killed, then all that it had started ends too
    demo.process.kill()
    eventually(lambda: not running(family), 15, what=lambda: running(family))


def test_up_starts_again_what_dies_and_keeps_what_was_stored(
    copy: Path, manage: Callable[..., Command]
) -> None:
    # Given a checkout that is up, with servers of its own
    with socket.socket() as probe, socket.socket() as other_probe:
        ports = []
        for one in (probe, other_probe):
            one.bind(("127.0.0.1", 0))
            ports.append(one.getsockname()[1])
    orders = f"http://127.0.0.1:{ports[0]}/orders"
    env = {"DATABASE_URL": "", "REDIS_URL": "", "PORT": f"{ports[0]}", "PAYMENTS_PORT": f"{ports[1]}"}
    is_up = f"Listening at: http://127.0.0.1:{ports[0]}"
    up = manage("up", project=copy, **env)
    up.wait_for("ready for action")
    up.wait_for(is_up)
    order = {"sku": "SKU-1", "quantity": 1, "customer": "someone@example.org"}
    assert httpx.post(orders, json=order).json()["id"] == 1

    # When the worker's first process and PostgreSQL are killed
    worker = next(p for p in up.process.children() if "dramatiq" in " ".join(p.cmdline()))
    postgres = next(p for p in up.process.children() if p.name() == "postgres")
    old = worker.children(recursive=True)
    worker.kill()
    up.wait_for("starts again in")
    postgres.kill()
    up.wait_for("PostgreSQL has ended and starts again")

    # Then all of it is there again, and nothing of the old worker
    eventually(lambda: up.output().count("booting up") == 2, 30, what=up.output)
    eventually(lambda: not running(old))
    assert httpx.post(orders, json=order).json()["id"] > 1

    # When it is stopped
    family = up.family()
    code = up.end(signal.SIGINT)

    # Then in good order, and nothing is left running
    assert code == 128 + signal.SIGINT
    assert re.search(r"worker +\| has stopped with code 0", up.output()), up.output()
    assert running(family) == []

    # And the next time the orders are still there
    up = manage("up", project=copy, **env)
    up.wait_for(is_up)
    assert httpx.post(orders, json=order).json()["id"] > 2


def test_a_checkout_that_is_up_is_refused_in_a_sentence(copy: Path, manage: Callable[..., Command]) -> None:
    # Given a checkout whose servers somebody has
    with kept_folder(copy):
        # When it is to be up
        up = manage("up", project=copy, DATABASE_URL="", REDIS_URL="")

        # Then the sentence says who has them
        assert up.process.wait(30) == 1
        assert f"Process {os.getpid()} uses the servers" in up.output()
        assert "Traceback" not in up.output()
