"""The settings: where they come from, and how a wrong one is refused."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from environs import EnvError

from .servers import PROJECT, settings_variables

if TYPE_CHECKING:
    from pathlib import Path

DEFAULTS = {
    "DATABASE_URL": None,
    "REDIS_URL": None,
    "REDIS_NAMESPACE": "dramatiq",
    "HEARTBEAT_TIMEOUT_MS": 5_000,
    "LOCK_TIMEOUT_MS": 2_000,
    "IDLE_LIMIT_MS": 60_000,
    "TRANSACTION_TIMEOUT_MS": 630_000,
    "CONNECT_TIMEOUT_S": 5,
    "KEEPALIVES_IDLE_S": 10,
    "KEEPALIVES_INTERVAL_S": 5,
    "KEEPALIVES_COUNT": 3,
    "PGBOUNCER": False,
    "REDIS_WINDOW": 10_000,
    "MAX_MESSAGE_BYTES": 1_048_576,
    "PORT": 8_000,
    "PAYMENTS_PORT": 8_001,
    "PAYMENTS_URL": "http://127.0.0.1:8001",
    "PAYMENTS_TIMEOUT_MS": 5_000,
    "PAYMENTS_FILE": ".payments/payments.sqlite",
}


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An environment without a setting, and no file."""
    for name in DEFAULTS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ONETAKE_ENV_FILE", "")
    return monkeypatch


def read_settings() -> dict[str, Any]:
    found = runpy.run_path(str(PROJECT / "settings.py"))
    return {name: value for name, value in found.items() if name.isupper() and name[0] != "_"}


def test_without_an_environment_each_setting_has_its_default(
    environment: pytest.MonkeyPatch,
) -> None:
    assert read_settings() == DEFAULTS


def test_the_example_shows_each_setting_with_its_default(
    environment: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # Given the example with all its lines in force but the addresses
    lines = (PROJECT / ".env.example").read_text().splitlines()
    values = [line[1:] for line in lines if re.match(r"#[A-Z_]+=", line)]
    assert set(settings_variables()) == set(DEFAULTS)
    file = tmp_path / "env"
    file.write_text("\n".join(line for line in values if "_URL=" not in line))

    # When it is read
    environment.setenv("ONETAKE_ENV_FILE", str(file))

    # Then it changes nothing
    assert read_settings() == DEFAULTS


def test_a_variable_of_the_process_wins_over_the_file(
    environment: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # Given two settings in a file and one of them in the process
    (tmp_path / "env").write_text("PORT=8001\nREDIS_NAMESPACE=file\n")
    environment.setenv("ONETAKE_ENV_FILE", str(tmp_path / "env"))
    environment.setenv("PORT", "8002")

    # When they are read
    found = read_settings()

    # Then the process is believed first, and the file where the process says nothing
    assert (found["PORT"], found["REDIS_NAMESPACE"]) == (8_002, "file")


def test_a_file_beside_the_settings_is_read(environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # Given a copy of the settings with an .env beside it
    environment.delenv("ONETAKE_ENV_FILE")
    (tmp_path / "settings.py").write_text((PROJECT / "settings.py").read_text())
    (tmp_path / ".env").write_text("PORT=8003\n")

    # When it is imported from anywhere, then that file counts
    assert runpy.run_path(str(tmp_path / "settings.py"))["PORT"] == 8_003


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("DATABASE_URL", "mysql://root@localhost/shop"),
        ("DATABASE_URL", "shop"),
        ("REDIS_URL", "localhost:6379"),
        ("REDIS_NAMESPACE", ""),
        ("REDIS_NAMESPACE", "a b"),
        ("HEARTBEAT_TIMEOUT_MS", "0"),
        ("LOCK_TIMEOUT_MS", "0"),
        ("LOCK_TIMEOUT_MS", "2s"),
        ("LOCK_TIMEOUT_MS", "60000"),
        ("IDLE_LIMIT_MS", "-1"),
        ("IDLE_LIMIT_MS", "700000"),
        ("TRANSACTION_TIMEOUT_MS", "600000"),
        ("CONNECT_TIMEOUT_S", "0"),
        ("KEEPALIVES_IDLE_S", "0.5"),
        ("KEEPALIVES_INTERVAL_S", "\u0665"),
        ("KEEPALIVES_COUNT", "1000"),
        ("PGBOUNCER", "perhaps"),
        ("REDIS_WINDOW", "0"),
        ("MAX_MESSAGE_BYTES", "1MiB"),
        ("PORT", "65536"),
        ("ONETAKE_ENV_FILE", "/does/not/exist"),
    ],
)
def test_a_value_that_cannot_work_is_refused(environment: pytest.MonkeyPatch, name: str, value: str) -> None:
    # Given one wrong value
    environment.setenv(name, value)

    # When the settings are read, then the sentence names variable and value, and what to do
    with pytest.raises(EnvError, match=name) as refused:
        read_settings()
    assert value.partition(":")[0] in str(refused.value)
    assert re.search(r"for example|Name one", str(refused.value))


def test_the_password_of_a_refused_url_is_not_shown(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("DATABASE_URL", "mysql://shop:secret@localhost/shop")
    with pytest.raises(EnvError) as refused:
        read_settings()
    assert "secret" not in str(refused.value)


def test_importing_the_application_needs_no_url_and_connects_to_nothing(
    environment: pytest.MonkeyPatch,
) -> None:
    # Given no configuration at all
    code = """
import socket, threading
socket.socket.connect = socket.create_connection = None
import actors, models, web, manage
assert threading.active_count() == 1, threading.enumerate()
"""
    # When everything is imported, then nothing complains
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=PROJECT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_first_connection_without_a_url_names_the_variable(
    environment: pytest.MonkeyPatch,
) -> None:
    # Given no DATABASE_URL
    # When a command needs it
    done = subprocess.run(
        [sys.executable, "manage.py", "migrate"],
        cwd=PROJECT,
        capture_output=True,
        text=True,
        check=False,
    )

    # Then it says so in a sentence
    assert done.returncode == 1
    assert done.stderr.startswith("Error: ")
    assert "DATABASE_URL" in done.stderr
    assert "Traceback" not in done.stderr
