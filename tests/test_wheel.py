"""The wheel: what is in it, and that another application needs nothing else."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import venv
from contextlib import closing
from importlib.metadata import Distribution, distribution
from typing import TYPE_CHECKING
from zipfile import ZipFile

import psycopg2
import pytest
from packaging.requirements import Requirement

from .processes import eventually
from .servers import PROJECT

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from .servers import Servers

DEPENDENCIES = {"dramatiq", "peewee", "psycopg2-binary", "redis"}

#: What the README's first screen tells another application to do, and what that has of its own.
APPLICATION = """
{readme}

import peewee

class Article(peewee.Model):
    name = peewee.TextField(primary_key=True)
    quantity = peewee.IntegerField()

    class Meta:
        database = database

@dramatiq.actor
def sell(name):
    Article.update(quantity=Article.quantity - 1).where(Article.name == name).execute()

@dramatiq.actor(max_retries=0)
def refund(name):
    raise NotImplementedError(name)

if __name__ == "__main__":
    database.create_tables([Article])
    Article.create(name="lamp", quantity=100)
    with database.atomic():
        message = sell.send("lamp")
        refund.send("lamp")
    for _ in range(2):
        broker.enqueue(message)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of this checkout."""
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)],
        cwd=PROJECT,
        check=True,
        capture_output=True,
    )
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture
def schema(clean: Servers) -> Iterator[str]:
    """The URL of an empty schema."""

    def execute(statement: str) -> None:
        with closing(psycopg2.connect(clean.postgres.url)) as connection, connection:
            connection.cursor().execute(statement)

    execute("CREATE SCHEMA another_application")
    yield f"{clean.postgres.url}&options=-csearch_path%3Danother_application"
    execute("DROP SCHEMA another_application CASCADE")


def needed(names: set[str]) -> dict[str, Distribution]:
    """These packages as they are installed here, and all that they need in turn."""
    found: dict[str, Distribution] = {}
    for name in names:
        found[name] = distribution(name)
        wanted = [Requirement(line) for line in found[name].requires or []]
        found |= needed({r.name for r in wanted if not r.marker or r.marker.evaluate({"extra": ""})})
    return found


def install(wheel: Path, folder: Path) -> Path:
    """A virtual environment with the wheel and what it says it needs; returns its Python.

    Nothing is downloaded: the packages are copied from here.
    """
    venv.create(folder, with_pip=False)
    (site,) = folder.glob("lib/python*/site-packages")
    with ZipFile(wheel) as archive:
        archive.extractall(site)
    for package in needed(DEPENDENCIES).values():
        for file in package.files or []:
            if not file.is_absolute() and ".." not in file.parts:
                (site / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(str(package.locate_file(file)), site / file)
    return folder / "bin" / "python"


def test_the_wheel_holds_the_middleware_and_names_what_it_needs(wheel: Path) -> None:
    # Given a wheel
    with ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = [archive.read(name).decode() for name in names if name.endswith("/METADATA")]

    # Then every file of the folder is in it under the import name, and no other
    there = {
        f"onetake/{path.relative_to(PROJECT / 'middleware')}"
        for path in (PROJECT / "middleware").rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    assert {name for name in names if ".dist-info/" not in name} == there
    assert "onetake/py.typed" in there

    # And it needs the four packages, in versions that include those that it is tested with
    lines = re.findall(r"^Requires-Dist: (.+)$", metadata, re.MULTILINE)
    required = [r for r in map(Requirement, lines) if not r.marker]
    assert {r.name for r in required} == DEPENDENCIES
    assert all(distribution(r.name).version in r.specifier for r in required)
    assert re.search(r"^License-Expression: MIT$", metadata, re.MULTILINE)
    assert re.search(r"^Requires-Python: >=3\.11$", metadata, re.MULTILINE)


def test_another_application_sees_its_duplicates_answered(
    wheel: Path, clean: Servers, schema: str, tmp_path: Path
) -> None:
    # Given an environment with the wheel alone, and an application beside it that follows the README
    python = install(wheel, tmp_path / "environment")
    snippet = re.search(r"```python\n(.+?)```", (PROJECT / "README.md").read_text(), re.DOTALL)
    assert snippet
    project = tmp_path / "another application"
    project.mkdir()
    (project / "shop.py").write_text(APPLICATION.format(readme=snippet[1]))
    env = {**os.environ, "DATABASE_URL": schema, "REDIS_URL": clean.redis.url}

    def onetake(*arguments: str) -> str:
        command = [str(python), "-m", "onetake", *arguments, "--broker", "shop"]
        done = subprocess.run(command, cwd=project, env=env, stdout=subprocess.PIPE, text=True, check=False)
        return done.stdout

    # And the tables that the wheel makes
    assert onetake("migrate").split() == [
        "processed_messages",
        "outbox_messages",
        "dead_letters",
        "barriers",
        "barrier_members",
        "ticks",
    ]

    # When it sends a message three times, and a relay and a worker do their work
    subprocess.run([python, "shop.py"], cwd=project, env=env, check=True)
    log = tmp_path / "log"
    commands = [
        ["onetake", "relay", "--broker", "shop"],
        ["dramatiq", "shop", "--processes", "1", "--threads", "2"],
    ]
    with log.open("ab") as output:
        processes = [
            subprocess.Popen([python, "-m", *command], cwd=project, env=env, stdout=output, stderr=output)
            for command in commands
        ]
    try:
        # Then two of the three are answered as duplicates
        eventually(lambda: log.read_text().count("Duplicate answered") == 2, 30, what=log.read_text)
        eventually(lambda: "NotImplementedError" in onetake("dead-letters", "list"), what=log.read_text)
    finally:
        for process in processes:
            process.terminate()
    assert [process.wait(30) for process in processes] == [0, 0], log.read_text()

    # And one lamp was sold, and nothing is owed
    with closing(psycopg2.connect(schema)) as connection:
        cursor = connection.cursor()
        cursor.execute("SELECT quantity, (SELECT count(*) FROM outbox_messages) FROM article")
        assert cursor.fetchone() == (99, 0)
