"""``zeroj bench-io``: every setting is measured, the best is a section that the config takes."""

from __future__ import annotations

import json
import pathlib

import pytest

from zeroj.cli import main
from zeroj.config.config import Config
from zeroj.spill.bench import Measured, best
from zeroj.spill.folder import NAME


def test_the_best_section_is_one_that_a_config_takes(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["--size", "1MB", "--piece", "256KB", "--rounds", "1", "--blocks", "64KB", "128KB"]
    assert main(["bench-io", str(tmp_path), *small, "--depths", "2", "3", "--threads", "1"]) == 0
    out = capsys.readouterr().out
    rows = [line.split() for line in out.splitlines()[2:6]]
    assert [(row[0], row[1]) for row in rows] == [
        (block, depth) for block in ("64000", "128000") for depth in ("2", "3")
    ]
    assert all(float(row[3]) > 0 and float(row[4]) > 0 for row in rows)
    section = json.loads(out[out.index("{") :])
    config = Config.load({"train_batch_size": 8, **section})
    assert config.report()
    assert [row for row in rows if row[-1] == "best"] == [
        row for row in rows if (int(row[0]), int(row[1])) == tuple(list(section["aio"].values())[:2])
    ]
    assert not [p for p in (tmp_path / NAME).iterdir() if p.is_dir()], "its files are deleted"


def test_a_path_that_cannot_be_used_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench-io", "/proc/nothing"]) == 2
    assert "cannot be used" in capsys.readouterr().err


def test_the_best_has_the_least_time_for_a_read_and_a_write_and_equals_go_to_the_smaller() -> None:
    fast_read = Measured(1 << 20, 8, 1, read=4e9, write=1e9)
    balanced = Measured(4 << 20, 8, 2, read=2.5e9, write=2.5e9)
    as_good = Measured(1 << 20, 4, 1, read=2.45e9, write=2.5e9)
    assert best([fast_read, balanced]) is balanced
    assert best([fast_read, balanced, as_good]) is as_good
