"""A group of params that stands still is named, with the reason; text is that of a plain loop."""

from __future__ import annotations

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import zeroj as zj
from tests.trainer import toy
from tests.trainer.test_arguments import STAGE_2, STAGE_3
from tests.trainer.test_trainer import arguments, losses_of

pytestmark = pytest.mark.usefixtures("compile_fast")
CPU = {"device": "cpu", "pin_memory": True}


class Adapted(nnx.Module):
    """An embedding with two adapters, one of which the loss does not use."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(toy.VOCAB, toy.WIDTH, rngs=rngs)
        self.lora_used = nnx.Param(0.1 * jnp.ones((toy.WIDTH, toy.VOCAB)))
        self.lora_idle = nnx.List([nnx.Param(jnp.ones((4, 4))) for _ in range(2)])

    def __call__(self, input_ids: jax.Array) -> jax.Array:
        return self.embed(input_ids) @ self.lora_used[...]


def adapted(tmp_path: pathlib.Path, **given: Any) -> zj.Trainer:
    args = arguments(tmp_path, **{"max_steps": 3} | given)
    return zj.Trainer(
        Adapted(nnx.Rngs(0)), args, train_dataset=toy.text(32), trainable=lambda path, leaf: "lora" in path
    )


def test_an_unused_adapter_is_named_and_frozen_params_stay(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = adapted(tmp_path)
    with pytest.warns(UserWarning, match=r"lora_idle/\*\. No gradient reaches them"):
        trainer.train()
    params = zj.full_params(trainer.engine.state, trainer.engine.plan)
    np.testing.assert_array_equal(params.embed.embedding[...], Adapted(nnx.Rngs(0)).embed.embedding[...])
    shown = {
        line.split()[0]: line.split()[1]
        for line in capsys.readouterr().out.splitlines()
        if "lora_" in line[:20]
    }
    assert float(shown["lora_used"]) > 1e-3 and float(shown["lora_idle/*"]) == 0 and "embed" not in shown


def test_a_rate_of_zero_is_the_reason(tmp_path: pathlib.Path) -> None:
    with pytest.warns(UserWarning, match="learning rate was 0"):
        adapted(tmp_path, learning_rate=0.0).train()


def test_skipped_updates_are_the_reason(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    fp16 = {"enabled": True, "initial_scale_power": 40, "hysteresis": 100}
    trainer = adapted(tmp_path, deepspeed={"fp16": fp16, "zero_optimization": {"stage": 2}}, fp16=True)
    with pytest.warns(UserWarning, match="Every update was skipped"):
        trainer.train()
    assert trainer.state.log_history[0]["skipped"] == 1
    assert "updates were skipped" in capsys.readouterr().out


@pytest.mark.parametrize("stage", (pytest.param(1, marks=pytest.mark.full), 3))
def test_generated_text_is_a_plain_loops(stage: int, tmp_path: pathlib.Path) -> None:
    zero = {"stage": stage} | ({"stage3_param_persistence_threshold": 0} if stage == 3 else {})
    args = arguments(tmp_path, deepspeed={"zero_optimization": zero}, max_steps=1)
    trainer = zj.Trainer(toy.net(), args, train_dataset=toy.text(16))
    prompts = [[1, 2, 3], [7], [4, 6]]
    found = trainer.generate(prompts, max_new_tokens=5)
    model = toy.net()
    for prompt, text in zip(prompts, found, strict=True):
        wanted = list(prompt)
        for _ in range(5):
            wanted.append(int(model(jnp.array([wanted]))[0, -1].argmax()))
        assert text == wanted
    end = found[0][4]
    short = trainer.generate(prompts, max_new_tokens=5, eos_token_id=end)
    assert short[0] == found[0][: found[0].index(end, 3) + 1]
    drawn = [trainer.generate(prompts, max_new_tokens=5, temperature=1.0, seed=s) for s in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]


@pytest.mark.slow
@pytest.mark.parametrize("stage", (pytest.param(2, marks=pytest.mark.full), 3))
def test_the_documented_templates_train(stage: int, tmp_path: pathlib.Path) -> None:
    """In fp16, state and params on the host, saved in between; the losses of the same run in fp16 without ZeRO."""
    template = STAGE_2 if stage == 2 else STAGE_3
    zero = template["zero_optimization"] | {"offload_optimizer": CPU}
    zero |= {"offload_param": CPU} if stage == 3 else {}
    rows, found = toy.text(80), []
    for config in (
        template | {"zero_optimization": zero},
        {"zero_optimization": {"stage": 0}, "scheduler": template["scheduler"]},
    ):
        args = arguments(
            tmp_path, deepspeed=config, fp16=True, max_steps=5, gradient_accumulation_steps=2, save_steps=3,
            save_strategy="steps",
        )  # fmt: skip
        trainer = zj.Trainer(toy.net(), args, train_dataset=rows)
        trainer.train()
        found.append(losses_of(trainer))
        kinds = {x.sharding.memory_kind for x in jax.tree.leaves(trainer.engine.state.opt_state)}
        assert ("pinned_host" in kinds) == (
            config is not None and "offload_optimizer" in config["zero_optimization"]
        )
    np.testing.assert_allclose(found[0], found[1], rtol=2e-3)
