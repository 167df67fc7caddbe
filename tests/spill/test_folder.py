"""Each run has its own locked folder; a dead run's is deleted; nothing else is touched."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from zeroj.errors import SpillError
from zeroj.spill.folder import NAME, RunFolder, file_system

ROOT = pathlib.Path(__file__).parents[2]
# The folder's module alone: importing the whole of zeroj, and so JAX, takes seconds.
HOLD = """
import os, signal, sys, time, types
sys.modules["zeroj"] = types.ModuleType("zeroj")
sys.modules["zeroj"].__path__ = ["zeroj"]
from zeroj.spill.folder import RunFolder
mine = RunFolder(sys.argv[1])
open(mine.path + "/data", "wb").write(b"x" * 10000)
print(mine.path, len(mine.reclaimed), flush=True)
if sys.argv[2] == "die":
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(float(sys.argv[2]))
"""


def hold(path: pathlib.Path, seconds: object) -> subprocess.Popen[str]:
    arguments = [sys.executable, "-c", HOLD, str(path), str(seconds)]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, cwd=ROOT)


def folders(path: pathlib.Path) -> set[str]:
    return {str(p) for p in (path / NAME).iterdir() if p.is_dir()}


def test_a_folder_goes_with_its_object(tmp_path: pathlib.Path) -> None:
    mine, other = RunFolder(tmp_path / "absent" / "yet"), RunFolder(tmp_path / "absent" / "yet")
    assert mine.path != other.path and os.path.isdir(mine.path) and os.path.isdir(other.path)
    assert mine.reclaimed == other.reclaimed == []
    mine.close()
    assert not os.path.exists(mine.path) and os.path.isdir(other.path)
    kept = other.path
    del other
    assert not os.path.exists(kept)


def test_a_living_runs_folder_is_left_alone_and_a_killed_ones_is_deleted(tmp_path: pathlib.Path) -> None:
    process = hold(tmp_path, 600)
    assert process.stdout is not None
    theirs = process.stdout.readline().split()[0]
    mine = RunFolder(tmp_path)
    assert folders(tmp_path) == {theirs, mine.path} and mine.reclaimed == []
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert os.path.exists(f"{theirs}/data")
    again = RunFolder(tmp_path)
    assert again.reclaimed == [theirs] and folders(tmp_path) == {mine.path, again.path}


def test_nothing_that_zeroj_did_not_make_is_deleted(tmp_path: pathlib.Path) -> None:
    RunFolder(tmp_path).close()
    root = tmp_path / NAME
    sentinels = [tmp_path / "mine", root / "notes", root / "other_host-1-abcd" / "lock"]
    import socket

    host = "".join(c if c.isalnum() else "_" for c in socket.gethostname())
    sentinels.append(root / f"{host}-1-abcd" / "no_lock_here")
    for sentinel in sentinels:
        sentinel.parent.mkdir(exist_ok=True)
        sentinel.write_text("keep")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "lock").write_text("keep")
    (root / f"{host}-2-abcd").symlink_to(elsewhere)
    assert RunFolder(tmp_path).reclaimed == []
    assert all(s.read_text() == "keep" for s in [*sentinels, elsewhere / "lock"])


def test_eight_processes_at_once(tmp_path: pathlib.Path) -> None:
    processes = [hold(tmp_path / "new", 0.5) for _ in range(8)]
    said = [p.communicate(timeout=120)[0].split() for p in processes]
    assert all(p.returncode == 0 for p in processes)
    assert len({path for path, _ in said}) == 8
    RunFolder(tmp_path / "new").close()
    assert folders(tmp_path / "new") == set()


def test_restarts_do_not_add_up(tmp_path: pathlib.Path) -> None:
    """Twenty runs that are killed one after another leave no more than the last one's folder."""
    left = set()
    for _ in range(20):
        process = hold(tmp_path, "die")
        left.add(process.communicate()[0].split()[0])
        assert process.returncode == -signal.SIGKILL
        assert len(folders(tmp_path)) == 1
    assert len(left) == 20


def test_paths_that_cannot_be_used(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(SpillError, match=r"nvme_path '.*file'.*cannot be used"):
        RunFolder(file)
    with pytest.raises(SpillError, match="cannot be used"):
        RunFolder("/proc/nothing/here")


def test_a_read_only_path(tmp_path: pathlib.Path) -> None:
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "ro,size=1m", "none", str(tmp_path)], capture_output=True
    )
    if done.returncode:
        pytest.skip(f"cannot mount a file system here: {done.stderr.decode().strip()}")
    try:
        with pytest.raises(SpillError, match="Read-only file system"):
            RunFolder(tmp_path)
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def test_a_relative_path_is_taken_from_the_directory_of_the_start(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    mine = RunFolder("here")
    monkeypatch.chdir("/")
    assert mine.path.startswith(str(tmp_path / "here" / NAME)) and os.path.isdir(mine.path)


def test_memory_is_no_disk(tmp_path: pathlib.Path) -> None:
    if not os.path.isdir("/dev/shm") or file_system("/dev/shm") != "tmpfs":
        pytest.skip("no tmpfs at /dev/shm")
    with pytest.warns(UserWarning, match="tmpfs, which is RAM"):
        mine = RunFolder(f"/dev/shm/zeroj-test-{os.getpid()}-{time.monotonic_ns()}")
    base = pathlib.Path(mine.path).parents[1]
    mine.close()
    import shutil

    shutil.rmtree(base)
