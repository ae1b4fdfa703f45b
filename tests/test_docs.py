"""The documents agree with the code: numbers, settings, links, proofs and the example."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import TYPE_CHECKING

import psycopg2
import pytest
from dramatiq import Message
from dramatiq.brokers.redis import RedisBroker

from .processes import eventually
from .servers import PROJECT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from .processes import WorkerProcess
    from .servers import Servers

DOCUMENTS = [PROJECT / "README.md", PROJECT / "CHANGELOG.md", *sorted((PROJECT / "docs").rglob("*.md"))]
DESIGN = PROJECT / "docs" / "design"

#: What the reader of the example has besides.
ACTOR = """
@dramatiq.actor
def take() -> None:
    database.execute_sql("UPDATE stock SET quantity = quantity - 1")
"""


def source_files() -> Iterator[Path]:
    """The project's own Python files."""
    for path in sorted(PROJECT.rglob("*.py")):
        folders = path.relative_to(PROJECT).parts[:-1]
        if not any(folder.startswith(".") or folder == "dist" for folder in folders):
            yield path


def name_of(path: Path) -> str:
    return path.relative_to(PROJECT).as_posix()


def rows_of(document: Path, heading: str) -> list[list[str]]:
    """The cells of the table whose first heading is given, without backquotes."""
    _, _, table = document.read_text("utf-8").partition(f"\n| {heading} |")
    lines = [line for line in table.split("\n\n")[0].splitlines()[2:] if line.startswith("|")]
    return [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in lines]


def anchors_of(document: Path) -> set[str]:
    """The anchors that GitHub gives to the headings."""
    headings = re.findall(r"^#+ (.+)$", document.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def numbers_in(source: str, letter: str) -> set[str]:
    """The numbers that a source cites: as T1, or in the name of a test as ``..._t1``."""
    cited = re.findall(rf"\b{letter}([1-9]\d?)\b", source)
    named = re.findall(rf"_{letter.lower()}([1-9]\d?)(?=[_(])", source)
    return {f"{letter}{number}" for number in (*cited, *named)}


@pytest.mark.parametrize(("letter", "document"), [("T", "traps.md"), ("I", "invariants.md")])
def test_every_trap_and_invariant_that_the_code_cites_is_explained(letter: str, document: str) -> None:
    # Given the numbers that have a heading
    explained = set(re.findall(rf"^#+ ({letter}\d+) ", (DESIGN / document).read_text("utf-8"), re.MULTILINE))

    # When those that the code cites are collected
    cited = {
        (name_of(path), number)
        for path in source_files()
        for number in numbers_in(path.read_text("utf-8"), letter)
    }

    # Then each is among them
    assert {(path, number) for path, number in cited if number not in explained} == set()


def test_every_setting_is_listed_with_its_default() -> None:
    # Given the settings, read without any variable or file
    program = (
        "import json, settings\n"
        "names = [name for name in vars(settings) if name.isupper() and name[0] != '_']\n"
        "print(json.dumps({name: getattr(settings, name) for name in names}))"
    )
    run = subprocess.run(
        [sys.executable, "-c", program],
        cwd=PROJECT,
        env={"ONETAKE_ENV_FILE": ""},
        capture_output=True,
        check=True,
    )
    defaults = json.loads(run.stdout)
    assert defaults

    # When the table of the document is read
    listed = {name: default for name, default, *_ in rows_of(PROJECT / "docs" / "settings.md", "variable")}

    # Then it lists each of them, and nothing else but the variable that names the file
    texts = {
        name: "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in defaults.items()
    }
    del listed["ONETAKE_ENV_FILE"]
    assert listed == texts


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_every_relative_link_leads_somewhere(document: Path) -> None:
    # Given the links of a document
    links = re.findall(r"\]\(([^)\s]+)\)", document.read_text("utf-8"))

    # When those into this repository are followed
    broken = []
    for link in links:
        path, _, anchor = link.partition("#")
        if ":" in path:
            continue
        target = (document.parent / path).resolve() if path else document
        if not target.exists() or (anchor and anchor not in anchors_of(target)):
            broken.append(link)

    # Then each has a target
    assert broken == []


def test_every_test_file_that_is_named_as_a_proof_cites_its_invariant() -> None:
    # Given the sections of the document, and the test files that each names
    _, *sections = re.split(r"^## ", (DESIGN / "invariants.md").read_text("utf-8"), flags=re.MULTILINE)
    named = {
        (section.partition(" ")[0], file)
        for section in sections
        for file in re.findall(r"\[(test_\w+\.py)\]", section)
    }

    # Then each invariant has one, and each of the files cites the number
    assert {number for number, _ in named} == {section.partition(" ")[0] for section in sections}
    missing = {
        (number, file)
        for number, file in named
        if number not in numbers_in((PROJECT / "tests" / file).read_text("utf-8"), "I")
    }
    assert missing == set()


def test_every_command_of_the_readme_is_a_target_of_the_makefile() -> None:
    # Given the targets
    targets = set(re.findall(r"^([a-z-]+):", (PROJECT / "Makefile").read_text("utf-8"), re.MULTILINE))

    # Then each `make ...` of the README is one
    named = set(re.findall(r"`make ([a-z-]+)", (PROJECT / "README.md").read_text("utf-8")))
    assert named - targets == set()


def test_the_example_of_the_readme_makes_an_actor_idempotent(
    clean: Servers, worker_process: Callable[..., WorkerProcess], tmp_path: Path
) -> None:
    # Given the example as a module, with an actor below it, and a worker for it
    (example,) = re.findall(r"```python\n(import os\n.*?)```", (PROJECT / "README.md").read_text(), re.DOTALL)
    assert "from onetake import" in example
    (tmp_path / "example.py").write_text(example.replace("from onetake", "from middleware") + ACTOR)
    worker = worker_process(module="example", env={"PYTHONPATH": str(tmp_path)})
    connection = psycopg2.connect(clean.postgres.url)
    with connection, connection.cursor() as cursor:
        cursor.execute("INSERT INTO stock VALUES ('SKU-1', 10)")

    # When a message is delivered three times
    broker = RedisBroker(url=clean.redis.url, middleware=[])
    message: Message[None] = Message(queue_name="default", actor_name="take", args=(), kwargs={}, options={})
    broker.declare_queue("default")
    for _ in range(3):
        broker.enqueue(message)
    eventually(lambda: broker.do_qsize("default") == 0, what=worker.output)

    # Then it has taken effect once, and two duplicates were answered
    with connection, connection.cursor() as cursor:
        cursor.execute("SELECT quantity FROM stock")
        assert cursor.fetchall() == [(9,)]
    assert worker.output().count("Duplicate answered") == 2
    broker.close()
    broker.client.close()
    connection.close()
