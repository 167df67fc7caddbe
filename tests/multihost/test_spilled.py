"""Two real processes with state and params in files on one path, and two jobs at once on it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tests.multihost.spill_worker import train
from tests.multihost.test_two_processes import run_processes
from zeroj.spill.folder import NAME

pytestmark = [pytest.mark.usefixtures("compile_fast"), pytest.mark.full]
WORKER = "tests.multihost.spill_worker"


def same(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        np.testing.assert_allclose(found[key], value, rtol=2e-5, atol=1e-6, err_msg=key)


def test_two_processes_of_one_job_and_another_job_beside_them(tmp_path: Path) -> None:
    """All use one nvme_path: the folders differ, the numbers are those of one process alone."""
    jobs = [tmp_path / "first", tmp_path / "second"]
    shared = tmp_path / "nvme"
    for job in jobs:
        job.mkdir()
        (job / "nvme").symlink_to(shared)
    shared.mkdir()
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda job: run_processes(job, 0, worker=WORKER), jobs))
    alone = tmp_path / "alone"
    alone.mkdir()
    wanted = train(alone)
    for job in found:
        np.testing.assert_array_equal(job[0]["losses"], job[1]["losses"])
        for process in job:
            same(process, wanted)
    left = [p for p in (shared / NAME).iterdir() if p.is_dir()]
    assert not left, "processes that ended left their files"
