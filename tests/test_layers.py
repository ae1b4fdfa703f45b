"""Imports go down only: web, manage -> actors -> models -> settings, middleware."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

REPOSITORY = Path(__file__).parent.parent

#: What each part may import of this repository, besides itself.
ALLOWED = {
    "middleware": set[str](),
    "settings": {"middleware"},
    "embedded": set[str](),
    "models": {"settings", "middleware"},
    "actors": {"settings", "middleware", "models"},
    "payments": {"settings"},
    "web": {"settings", "middleware", "models", "actors"},
    "commands": {"settings", "middleware", "models", "actors", "embedded"},
    "manage": {"settings", "middleware", "models", "actors", "embedded", "commands"},
}

#: What the middleware may import of other people's. It is built as a wheel that depends on nothing
#: else; each of the others is imported in one file, and only where it is used.
MIDDLEWARE_NEEDS = {"dramatiq", "peewee", "playhouse", "psycopg2", "redis"}
MIDDLEWARE_MAY_USE = {"cronsim", "gevent"}


def imports_of(file: Path) -> Iterator[tuple[int, str]]:
    """Every absolute import of a file, also inside functions: its level and its first name."""
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield 0, alias.name.partition(".")[0]
        elif isinstance(node, ast.ImportFrom):
            yield node.level, (node.module or "").partition(".")[0]


def files_of(part: str) -> list[Path]:
    """The Python files of a folder or module at the top of the repository."""
    folder = REPOSITORY / part
    return sorted(folder.rglob("*.py")) if folder.is_dir() else [folder.with_suffix(".py")]


def parts() -> set[str]:
    """The names at the top of the repository that can be imported."""
    modules = {file.stem for file in REPOSITORY.glob("*.py")}
    return modules | {file.parent.name for file in REPOSITORY.glob("*/*.py")}


@pytest.mark.parametrize("part", ALLOWED)
def test_each_part_imports_only_what_lies_below_it(part: str) -> None:
    # Given the files of one part of the repository
    files = files_of(part)
    assert files

    # When their imports are read
    found = {
        (file.relative_to(REPOSITORY).as_posix(), name)
        for file in files
        for level, name in imports_of(file)
        if level == 0 and name in parts() - {part}
    }

    # Then each names a part that lies below
    assert {(file, name) for file, name in found if name not in ALLOWED[part]} == set()


def test_the_middleware_imports_nothing_but_what_its_wheel_depends_on() -> None:
    # Given the files of the middleware
    files = files_of("middleware")

    # When their absolute imports are read
    found = {name for file in files for level, name in imports_of(file) if level == 0}

    # Then they are of the standard library or a dependency of the wheel
    assert found - set(sys.stdlib_module_names) - MIDDLEWARE_NEEDS <= MIDDLEWARE_MAY_USE


@pytest.mark.parametrize("name", sorted(MIDDLEWARE_MAY_USE))
def test_an_optional_library_is_imported_in_one_file_of_the_middleware(name: str) -> None:
    # Given the files of the middleware
    files = files_of("middleware")

    # When those that import the library are counted
    users = [file.name for file in files if (0, name) in set(imports_of(file))]

    # Then there is one at most
    assert len(users) <= 1


@pytest.mark.parametrize("part", [part for part in ALLOWED if part != "manage"])
def test_no_relative_import_leaves_its_part(part: str) -> None:
    # Given the files of one part
    for file in files_of(part):
        # When its relative imports are followed upwards
        depth = len(file.relative_to(REPOSITORY).parts) - 1
        levels = [level for level, _ in imports_of(file)]

        # Then none goes above the part's own folder
        assert max(levels, default=0) <= depth
