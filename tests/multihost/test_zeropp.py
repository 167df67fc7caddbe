"""ZeRO++ where a node is a real process: two and four of them over gloo train as one process does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.multihost.test_two_processes import run_processes
from tests.multihost.zeropp_worker import STEPS, train

pytestmark = [pytest.mark.usefixtures("compile_fast"), pytest.mark.slow]
#: A sum in another order may turn one rounding of the quantiser, which is a step of a block.
WITHIN = {"hpZ": 1e-6, "all": 1e-3}


@pytest.mark.parametrize(
    ("count", "form"),
    [
        (2, "all"),
        pytest.param(4, "all", marks=pytest.mark.full),
        pytest.param(2, "hpZ", marks=pytest.mark.full),
    ],
)
def test_processes_as_nodes_train_as_one_process(count: int, form: str, tmp_path: Path) -> None:
    together = run_processes(tmp_path, form, count, worker="tests.multihost.zeropp_worker")
    alone = train(form, count)
    assert alone["seen"].shape == (STEPS, 2) and alone["seen"][-1, 0] < alone["seen"][0, 0]
    for found in together:
        assert found.keys() == alone.keys()
        for name, wanted in alone.items():
            distance = np.linalg.norm(found[name] - wanted) / np.linalg.norm(wanted)
            assert distance <= WITHIN[form], (name, distance)
    for found in together[1:]:
        for name, value in together[0].items():
            np.testing.assert_array_equal(value, found[name], err_msg=name)
