"""Where embedded servers keep everything, and as whom they run."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import pwd
import shutil
import subprocess
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass, field
from fcntl import LOCK_EX, LOCK_NB, flock
from pathlib import Path
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Open to every account, and on a disk.
OPEN_FOLDER = Path("/var/tmp")  # noqa: S108

#: Servers whose owner was killed need this long at most to notice it and to end.
LEFTOVER_LIMIT_S = 20


class ServerError(Exception):
    """An embedded server cannot run; the text says why and what to do."""


@dataclass(frozen=True)
class Folder:
    """The folder of the servers.

    Arguments:
      path: where it is.
      kept: False if it is deleted afterwards, so that nothing in it needs to last.
      account: the arguments of Popen that make a process run as another user. Empty unless we are
        root: PostgreSQL does not run as root.
      inherited: descriptors that the servers hold open too: the lock of a folder that is kept.
    """

    path: Path
    kept: bool
    account: dict[str, Any] = field(default_factory=dict)
    inherited: tuple[int, ...] = ()

    def home(self, name: str) -> Path:
        """A subfolder that belongs to the servers' account alone; made if it is absent."""
        path = self.path / name
        path.mkdir(mode=0o700, exist_ok=True)
        self.give(path)
        return path

    def program(self, package: str, name: str, *needs: str) -> Path:
        """A program out of a wheel, where the servers' account can run it.

        A wheel behind a closed folder, such as a home, stays there; a copy is made in this folder.

        Arguments:
          package: the import package of the wheel.
          name: the path of the program, relative to the folder that the package is in.
          needs: files and folders without which it does not run, relative to the same folder.

        Raises:
          ServerError: the wheel is not installed.
        """
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            raise ServerError(f"The package {package} is not installed; `make .venv` installs it.")
        site = Path(spec.origin).parent.parent
        if _may_run(self.account, site / name):
            return site / name
        copy = self.path / package
        if copy.exists():
            shutil.rmtree(copy)  # it may be of another version
        for need in (name, *needs):
            _copy(site / need, copy / need)
        for path in (copy, *copy.rglob("*")):
            self.give(path)
        return copy / name

    def give(self, path: Path) -> None:
        """Make the servers' account the owner of something that we made."""
        if self.account:
            os.chown(path, self.account["user"], self.account["group"], follow_symlinks=False)


@contextmanager
def temporary_folder() -> Iterator[Folder]:
    """A new folder, deleted at the end with all that is in it."""
    account = _account()
    parent = Path(tempfile.gettempdir())
    if not _may_pass(account, parent):
        parent = OPEN_FOLDER
    with tempfile.TemporaryDirectory(prefix="onetake-", dir=parent) as name:
        _let_pass(Path(name), account)
        yield Folder(Path(name), kept=False, account=account)


@contextmanager
def kept_folder(project: Path) -> Iterator[Folder]:
    """The one folder of a project, which stays; no other process can have it at the same time.

    It is `.onetake` in the project. Where we are root and the project lies behind a closed folder
    the servers' account cannot get there: then it is in /var/tmp, under a name made of the
    project's path.

    Raises:
      ServerError: another process has the folder, it is somebody else's, or it cannot be made.
    """
    account = _account()
    project = project.resolve()
    path = project / ".onetake"
    if not _may_pass(account, project):
        digest = hashlib.sha256(os.fsencode(project)).hexdigest()
        path = OPEN_FOLDER / f"onetake-{digest[:16]}"
    try:
        path.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise ServerError(
            f"The folder for the servers cannot be made: {error}. "
            f"Make the project writable, or set DATABASE_URL and REDIS_URL."
        ) from error
    # Anybody may have put a folder or a link of this name into /var/tmp.
    if path.is_symlink() or path.stat().st_uid != os.geteuid():
        raise ServerError(f"{path} belongs to another user; remove it or set DATABASE_URL.")
    _let_pass(path, account)
    lock = _lock(path)
    try:
        yield Folder(path, kept=True, account=account, inherited=(lock,))
    finally:
        os.close(lock)


def _account() -> dict[str, Any]:
    if os.geteuid() != 0:
        return {}
    try:
        nobody = pwd.getpwnam("nobody")
    except KeyError:
        raise ServerError(
            "PostgreSQL does not run as root, and here is no user `nobody` who could run it. "
            "Be another user, or set DATABASE_URL and REDIS_URL."
        ) from None
    return {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}


def _may_run(account: dict[str, Any], program: Path) -> bool:
    try:
        done = subprocess.run([program, "--version"], check=False, capture_output=True, cwd="/", **account)
    except PermissionError:
        return False
    return done.returncode == 0


def _may_pass(account: dict[str, Any], folder: Path) -> bool:
    command = ["/bin/sh", "-c", 'test -x "$1"', "sh", str(folder)]
    return subprocess.run(command, check=False, cwd="/", **account).returncode == 0


def _let_pass(folder: Path, account: dict[str, Any]) -> None:
    """Open our own folder to the account that runs the servers, and to nobody's curiosity."""
    folder.chmod(0o711 if account else 0o700)


def _copy(source: Path, target: Path) -> None:
    if source.is_dir():
        unused = shutil.ignore_patterns("include", "*.a")
        shutil.copytree(source, target, ignore=unused, dirs_exist_ok=True)
    elif source.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target)


def _lock(folder: Path) -> int:
    """Lock a folder for this process and its servers, which inherit the descriptor.

    So who gets the lock knows that nothing runs in there any more, whatever a crash left behind.
    """
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    deadline = monotonic() + LEFTOVER_LIMIT_S
    try:
        while not _try_lock(descriptor):
            owner = int(os.pread(descriptor, 20, 0) or b"0")
            if _is_alive(owner) or monotonic() > deadline:
                raise ServerError(f"Process {owner} uses the servers in {folder} already; stop it first.")
            sleep(0.1)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _try_lock(descriptor: int) -> bool:
    try:
        flock(descriptor, LOCK_EX | LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_alive(pid: int) -> bool:
    if pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
