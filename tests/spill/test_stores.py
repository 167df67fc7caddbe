"""Both engines hold the same guarantees: what is read is what was written, or a SpillError says what is wrong."""

from __future__ import annotations

import contextlib
import os
import pathlib
import subprocess
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from zeroj.errors import SpillError
from zeroj.spill import direct_store
from zeroj.spill.buffers import PAGE, STRETCH, aligned, copy_summed, digest, page_sums
from zeroj.spill.direct_store import DirectStore
from zeroj.spill.orbax_store import OrbaxStore

SIZES = [1, 511, 512, 513, 1023, 1024, 1025, 4096, 2**20 - 4, 2**20 + 4, 28_824_000]
LEAF = "blocks/0/kernel"


def small_blocks(folder: str, **options: Any) -> DirectStore:
    return DirectStore(folder, block_size=1 << 18, threads=2, queue_depth=2, **options)


ENGINES = pytest.mark.parametrize("make", [small_blocks, OrbaxStore], ids=["direct", "orbax"])


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> str:
    return str(tmp_path)


def pattern(nbytes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def read(store: Any, name: str, nbytes: int) -> np.ndarray:
    out = np.zeros(nbytes, np.uint8)
    store.read(name, out).result()
    return out


def written(make: Callable[..., Any], folder: str, nbytes: int = 300_001, **options: Any) -> Any:
    store = make(folder, **options)
    store.reserve({LEAF: nbytes})
    store.write(LEAF, pattern(nbytes)).result()
    return store


@ENGINES
def test_every_size_comes_back_bit_equal_when_all_are_in_flight_together(make: Any, folder: str) -> None:
    store = make(folder)
    store.reserve({str(n): n for n in SIZES})
    for seed in (1, 2):  # the second round overwrites the first
        for pending in [store.write(str(n), pattern(n, seed)) for n in SIZES]:
            pending.result()
        outs = {n: np.zeros(n, np.uint8) for n in SIZES}
        for pending in [store.read(str(n), out) for n, out in outs.items()]:
            pending.result()
        for n, out in outs.items():
            np.testing.assert_array_equal(out, pattern(n, seed), err_msg=str(n))


@ENGINES
@pytest.mark.parametrize("offset", [0, 1, 64])
def test_buffers_of_any_alignment(make: Any, folder: str, offset: int) -> None:
    n = 3 * PAGE + 17
    store = make(folder)
    store.reserve({LEAF: n})
    data, out = aligned(n + offset)[offset : offset + n], aligned(n + offset)[offset : offset + n]
    data[:] = pattern(n)
    store.write(LEAF, data).result()
    store.read(LEAF, out).result()
    np.testing.assert_array_equal(out, data)


@ENGINES
@pytest.mark.parametrize("kept", [300_000, 4096, 0])
@pytest.mark.parametrize("verify", [True, False])
def test_a_truncated_file_is_told_with_both_sizes(make: Any, folder: str, kept: int, verify: bool) -> None:
    store = written(make, folder, verify=verify)
    path = store.path(LEAF)
    whole = os.path.getsize(path)
    os.truncate(path, kept)
    with pytest.raises(SpillError) as error:
        read(store, LEAF, 300_001)
    for part in (LEAF, path, f"{whole} bytes", f"{kept} bytes", "last checkpoint"):
        assert part in str(error.value)


@ENGINES
def test_a_flipped_bit_is_told(make: Any, folder: str) -> None:
    store = written(make, folder)
    path = store.path(LEAF)
    for place in (0, 123_456, 300_000):
        _flip(path, place)
        with pytest.raises(SpillError, match="expected") as error:
            read(store, LEAF, 300_001)
        assert LEAF in str(error.value) and path in str(error.value)
        _flip(path, place)
        np.testing.assert_array_equal(read(store, LEAF, 300_001), pattern(300_001))


@ENGINES
def test_without_checksums_a_flipped_bit_passes_and_sizes_are_still_checked(make: Any, folder: str) -> None:
    store = written(make, folder, verify=False)
    _flip(store.path(LEAF), 7)
    assert (read(store, LEAF, 300_001) != pattern(300_001)).sum() == 1


@ENGINES
def test_a_lost_file_is_told(make: Any, folder: str) -> None:
    store = written(make, folder)
    os.unlink(store.path(LEAF))
    with pytest.raises(SpillError, match=LEAF):
        read(store, LEAF, 300_001)


@ENGINES
def test_what_was_never_written_or_reserved_is_not_read(make: Any, folder: str) -> None:
    store = make(folder)
    store.reserve({LEAF: 100})
    with pytest.raises(SpillError, match="never written"):
        store.read(LEAF, np.zeros(100, np.uint8))
    with pytest.raises(SpillError, match="No room was reserved"):
        store.write("other", np.zeros(100, np.uint8))
    with pytest.raises(SpillError, match="reserved 100 bytes, given 99"):
        store.write(LEAF, np.zeros(99, np.uint8))


@ENGINES
def test_an_older_files_contents_are_not_taken_for_data(make: Any, folder: str) -> None:
    """A store begins with nothing, whatever lies in its folder; and a piece of another size begins anew."""
    store = written(make, folder, 5000)
    store.reserve({LEAF: 6000})
    with pytest.raises(SpillError, match="never written"):
        store.read(LEAF, np.zeros(6000, np.uint8))


@ENGINES
def test_a_model_that_does_not_fit_is_refused_before_anything_is_written(make: Any, folder: str) -> None:
    store = written(make, folder)
    before = sorted(os.listdir(folder))
    with pytest.raises(SpillError, match=r"Not enough space.*wte \(1.00 TiB\)") as error:
        store.reserve({"wte": 2**40, "bias": 8})
    assert folder in str(error.value) and "(1.00 TiB), " in str(error.value)
    assert sorted(os.listdir(folder)) == before
    np.testing.assert_array_equal(read(store, LEAF, 300_001), pattern(300_001))


@pytest.fixture
def small_disk(tmp_path: pathlib.Path) -> Iterator[str]:
    """A file system of 4 MiB. Mounting one takes privileges that not every machine gives to tests."""
    point = tmp_path / "disk"
    point.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(point)], capture_output=True)
    if done.returncode:
        pytest.skip(f"cannot mount a small file system here: {done.stderr.decode().strip()}")
    yield str(point)
    subprocess.run(["umount", "-l", str(point)], check=True)


@ENGINES
def test_a_full_disk_is_told_and_what_was_written_before_stays(make: Any, small_disk: str) -> None:
    store = make(small_disk)
    store.reserve({LEAF: 2**20, "second": 2**20})
    store.write(LEAF, pattern(2**20)).result()
    with contextlib.suppress(OSError), open(f"{small_disk}/filler", "wb", buffering=0) as filler:
        while True:  # somebody else fills the disk
            filler.write(b"x" * 4096)
    if make is OrbaxStore:  # space is not preallocated, so the write itself fails
        with pytest.raises(SpillError, match=r"second.*(space|RESOURCE_EXHAUSTED)"):
            store.write("second", pattern(2**20)).result()
        with pytest.raises(SpillError, match="never written"):
            store.read("second", np.zeros(2**20, np.uint8))
    else:  # its space was taken at reserve, so nothing can go wrong now
        store.write("second", pattern(2**20, 2)).result()
        np.testing.assert_array_equal(read(store, "second", 2**20), pattern(2**20, 2))
    with pytest.raises(SpillError, match="Not enough space"):
        store.reserve({"third": 2**20})
    np.testing.assert_array_equal(read(store, LEAF, 2**20), pattern(2**20))


def test_space_that_goes_between_the_look_and_the_reserving(
    small_disk: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = small_blocks(small_disk)
    store.reserve({LEAF: 2**20})
    monkeypatch.setattr(direct_store, "check_room", lambda *a: None)
    with pytest.raises(SpillError, match=r"'wte' \(8388608 bytes\).*No space left"):
        store.reserve({"bias": 8, "wte": 2**23})
    assert len(os.listdir(small_disk)) == 1


def test_a_short_write_is_told_not_taken_for_whole(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The operating system may write less than it was given; here it stops in the middle of a page."""
    store = written(small_blocks, folder)
    real = os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda h, parts, at: min(real(h, parts, at), 1000))
    store.direct = True
    with pytest.raises(SpillError, match=rf"{LEAF}.*expected \d+ bytes written.*found 1000"):
        store.write(LEAF, pattern(300_001)).result()
    monkeypatch.undo()
    with pytest.raises(SpillError, match="never written"):
        store.read(LEAF, np.zeros(300_001, np.uint8))


def test_a_failing_device_is_told_in_the_systems_words(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = written(small_blocks, folder)

    def broken(*_: Any) -> int:
        raise OSError(5, os.strerror(5))

    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(SpillError, match=rf"Reading leaf '{LEAF}'.*Input/output error"):
        read(store, LEAF, 300_001)


def test_the_page_cache_is_used_where_a_file_system_refuses_direct_io(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def refusing(path: Any, flags: int, *mode: Any, **options: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, os.strerror(22))
        return real(path, flags, *mode, **options)

    monkeypatch.setattr(os, "open", refusing)
    store = written(small_blocks, folder)
    assert store.direct is False
    np.testing.assert_array_equal(read(store, LEAF, 300_001), pattern(300_001))


@pytest.mark.parametrize("size", [0, 1, 4096, STRETCH, STRETCH + 4097])
def test_what_is_copied_is_summed_as_it_would_be_at_once(size: int) -> None:
    data = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    out = np.zeros_like(data)
    assert copy_summed(out, data) == page_sums(data)
    np.testing.assert_array_equal(out, data)


def test_page_sums_see_changed_bits_and_changed_places() -> None:
    data = pattern(3 * PAGE + 5)
    swapped = data.copy()
    swapped[:PAGE], swapped[PAGE : 2 * PAGE] = data[PAGE : 2 * PAGE], data[:PAGE]
    shorter = data[:-1]
    assert len({digest([page_sums(x)]) for x in (data, swapped, shorter)}) == 3
    parts = [page_sums(data[:PAGE]), page_sums(data[PAGE:])]
    assert digest(parts) == digest([page_sums(data)])


def _flip(path: str, place: int) -> None:
    with open(path, "r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 4]))


def test_a_write_that_begins_before_a_read_has_ended_leaves_neither_waiting(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, begun, get = written(small_blocks, folder), threading.Event(), direct_store._Job._get

    def late(job: Any, handle: int, out: np.ndarray, start: int) -> None:
        begun.wait(30)
        get(job, handle, out, start)

    monkeypatch.setattr(direct_store._Job, "_get", late)
    reading = store.read(LEAF, np.zeros(300_001, np.uint8))
    writing = store.write(LEAF, pattern(300_001, 1))
    begun.set()
    writing.result(timeout=30)
    with contextlib.suppress(SpillError):  # the old bytes, or an error: never for ever
        reading.result(timeout=30)
    monkeypatch.undo()
    assert np.array_equal(read(store, LEAF, 300_001), pattern(300_001, 1))
