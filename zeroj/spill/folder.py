"""A run's own locked folder below a shared path, and what dead runs have left there.

``<path>/zeroj_spill/<host>-<pid>-<random>/`` belongs to one state of one process. The process holds a lock on the
file ``lock`` in it, which the kernel lets go when the process ends, however it ends: a folder whose lock can be
taken is a dead run's, and its files are deleted, never read. Folders of other hosts are left alone, since
a lock on a shared file system says nothing about them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pathlib
import secrets
import shutil
import socket
import warnings
import weakref
from collections.abc import Iterator

from zeroj.errors import SpillError

#: The folder below the user's path in which all of zeroj's folders lie.
NAME = "zeroj_spill"
LOCK = "lock"
#: File systems that are memory.
IN_MEMORY = ("tmpfs", "ramfs")


class RunFolder:
    """A folder of one's own, locked; deleted when this object goes, or by the next run on this host.

    Attributes:
        path: the folder.
        reclaimed: the folders of dead runs that were deleted on the way.

    Args:
        base: the user's path; made if absent. A relative one is taken from the working directory of now.

    Raises:
        SpillError: the path is no folder, cannot be made, or cannot be written.
    """

    def __init__(self, base: str | os.PathLike[str]) -> None:
        root = pathlib.Path(os.path.abspath(base)) / NAME
        try:
            root.mkdir(parents=True, exist_ok=True)
            with _locked(root / ".lock"):
                self.reclaimed = reclaim(root)
                self.path = str(root / f"{_host()}-{os.getpid()}-{secrets.token_hex(4)}")
                os.mkdir(self.path, 0o700)
                self._lock = _take(os.path.join(self.path, LOCK))
        except (OSError, ValueError) as error:
            said = error.strerror if isinstance(error, OSError) else str(error)
            raise SpillError(
                f"nvme_path {os.fspath(base)!r} ({root.parent}) cannot be used: {said}. "
                "It must be a folder that this process may write, on a local disk."
            ) from error
        self._free = weakref.finalize(self, _free, self.path, self._lock, os.getpid())
        kind = file_system(self.path)
        if kind in IN_MEMORY:
            warnings.warn(
                f"nvme_path {os.fspath(base)!r} is on {kind}, which is RAM: spilling there saves no memory.",
                stacklevel=2,
            )

    def close(self) -> None:
        """Deletes the folder, and gives the lock back."""
        self._free()


def reclaim(root: pathlib.Path) -> list[str]:
    """Deletes the folders of this host's dead runs below ``root``; what zeroj did not make is not looked at."""
    gone = []
    for folder in sorted(root.glob(f"{_host()}-*-*")):
        if folder.is_symlink() or not (folder / LOCK).is_file():
            continue
        with contextlib.suppress(OSError):
            handle = _take(os.fspath(folder / LOCK))
            try:
                shutil.rmtree(folder)
                gone.append(str(folder))
            finally:
                os.close(handle)
    return gone


def file_system(path: str) -> str:
    """The kind of file system that a path is on, such as "ext4"; empty where it cannot be told."""
    device = os.stat(path).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    with contextlib.suppress(OSError), open("/proc/self/mountinfo") as table:
        for line in table:
            left, _, right = line.partition(" - ")
            if left.split()[2] == number:
                return right.split()[0]
    return ""


def _take(path: str) -> int:
    """Opens and locks a file.

    Raises:
        BlockingIOError: another process, or another object of this one, holds the lock.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        raise
    return handle


@contextlib.contextmanager
def _locked(path: pathlib.Path) -> Iterator[None]:
    """Waits for a lock that processes hold only while they make or reclaim folders."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _free(path: str, lock: int, owner: int) -> None:
    if os.getpid() != owner:
        return  # a forked child has the object too, but the folder is its parent's
    shutil.rmtree(path, ignore_errors=True)
    os.close(lock)


def _host() -> str:
    return "".join(c if c.isalnum() else "_" for c in socket.gethostname()) or "host"
