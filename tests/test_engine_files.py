"""Real-world shapes of ds_config.json, from file to training."""

from __future__ import annotations

import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

import zeroj as zj
from tests import oracle
from tests.config.test_files import EXPECTED, FILES
from zeroj.config.reader import read
from zeroj.engine import SUPPORTED

pytestmark = [pytest.mark.usefixtures("compile_fast"), pytest.mark.filterwarnings("ignore:.*old spelling")]


def below(data: Any, folder: Path) -> Any:
    """The same file with everything that is written, written below a folder."""
    if not isinstance(data, dict):
        return data
    moved = {"nvme_path", "output_path"}
    return {k: str(folder / k) if k in moved and v != "auto" else below(v, folder) for k, v in data.items()}


class Events:
    """Stands in for tensorboardX."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def add_scalar(self, name: str, value: float, step: int) -> None:
        assert np.isfinite(value), name

    def close(self) -> None:
        pass


@pytest.mark.parametrize("name", EXPECTED)
def test_a_file_trains_three_steps_or_is_refused_by_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments, stage, precision, sizes, _ = EXPECTED[name]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "tensorboardX", types.SimpleNamespace(SummaryWriter=Events))
    config = zj.Config.load(below(read(FILES / f"{name}.json")[0], tmp_path), **arguments)
    local = max(2, config.zero.zero_hpz_partition_size)  # hpZ's group lies within a node
    mesh = zj.make_mesh(node=2, local=local, devices=jax.devices()[: 2 * local])
    sizes = replace(sizes, train=sizes.train * local // 2)  # the table's is for four devices
    params, batches = oracle.toy_params(), oracle.toy_batches(3, sizes.train)
    tx = optax.adam(1e-2) if config.make_optimizer() is None else None
    lacking = set(config.needs()) - SUPPORTED
    if lacking:
        with pytest.raises(zj.ConfigError) as caught:
            zj.initialize(oracle.toy_loss, params, config, tx=tx, mesh=mesh)
        assert all(need in str(caught.value) for need in lacking)
        return
    engine = zj.initialize(oracle.toy_loss, params, config, tx=tx, mesh=mesh)
    assert (config.zero.stage, engine.plan.precision.name) == (stage, precision)
    assert engine.plan.zero.stage == (3 if stage == 2 and config.zero.overlap_comm else stage)
    seen = [engine.train_batch(batches[0])]
    while (
        int(engine.state.step) < 3 and len(seen) < 12
    ):  # fp16 first looks for a scale that does not overflow
        seen.append(engine.train_batch(batches[len(seen) % 3]))
    made = [m for m in seen if bool(m["applied"])]
    assert len(made) == 3 and (precision == "fp16" or len(seen) == 3)
    np.testing.assert_allclose(float(seen[0]["loss"]), oracle.toy_loss(params, batches[0]), rtol=2e-2)
    assert all(np.isfinite(float(m["loss"])) and np.isfinite(float(m["grad_norm"])) for m in made)
    assert engine.global_samples == len(seen) * sizes.train
    after = zj.full_params(engine.state, engine.plan)
    # DeepSpeed's warm-up spends two updates at its smallest rate, which is often zero: the third one moves
    assert 0 < oracle.distance(after, params) < 0.5
    assert engine.get_batch_info() == (sizes.train, sizes.micro, sizes.accumulation)
    engine.close()
