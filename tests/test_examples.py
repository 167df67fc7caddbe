"""The examples: their parts by themselves, and the scripts as a user runs them."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

ROOT = pathlib.Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
sys.path.insert(0, str(EXAMPLES))

import gpt  # noqa: E402
import text  # noqa: E402

TINY = {"layers": 2, "heads": 2, "width": 16, "context": 8, "vocab_size": 32}


def run_script(*arguments: str, cwd: pathlib.Path) -> subprocess.CompletedProcess[str]:
    """Run an example as a user would; its output is shown where it fails."""
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(ROOT),
        "JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
    }
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / arguments[0]), *arguments[1:]],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=400,
    )
    print(done.stdout, done.stderr, sep="\n")
    return done


def tokens(batch: int, length: int, seed: int = 0) -> jax.Array:
    return jax.random.randint(jax.random.key(seed), (batch, length), 0, TINY["vocab_size"])


@pytest.mark.parametrize("scan", [True, False])
def test_gpt_does_not_look_ahead(scan: bool) -> None:
    definition, init_fn = gpt.build(gpt.GPTConfig(**TINY, scan=scan))
    params, one = jax.jit(init_fn)(), tokens(1, 8)
    other = one.at[0, 5].set((one[0, 5] + 1) % TINY["vocab_size"])
    apply = jax.jit(gpt.apply, static_argnums=0)
    before, after = (apply(definition, params, x) for x in (one, other))
    np.testing.assert_array_equal(before[:, :5], after[:, :5])
    assert jnp.abs(before[:, 5:] - after[:, 5:]).max() > 1e-4


def test_scanned_and_unrolled_gpt_are_the_same_function() -> None:
    definition, init_fn = gpt.build(gpt.GPTConfig(**TINY, scan=False))
    scanned_definition, scanned_init = gpt.build(gpt.GPTConfig(**TINY, scan=True))
    params, scanned = jax.jit(init_fn)(), jax.jit(scanned_init)()
    blocks = [params["blocks"][i] for i in range(TINY["layers"])]
    scanned["blocks"] = jax.tree.map(lambda *layers: jnp.stack(layers), *blocks)
    for name in ("tokens", "positions", "norm"):
        scanned[name] = params[name]
    batch = {"tokens": tokens(2, 9)}
    listed = jax.jit(gpt.make_loss_fn(definition))(params, batch)
    np.testing.assert_allclose(
        jax.jit(gpt.make_loss_fn(scanned_definition))(scanned, batch), listed, rtol=1e-6
    )


@pytest.mark.parametrize("scan", [True, False])
def test_remat_changes_no_gradient(scan: bool) -> None:
    grads = []
    for remat in (False, True):
        definition, init_fn = gpt.build(gpt.GPTConfig(**TINY, scan=scan, remat=remat))
        loss_fn = gpt.make_loss_fn(definition)
        grads.append(jax.jit(jax.grad(loss_fn))(jax.jit(init_fn)(), {"tokens": tokens(2, 9)}))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7), *grads)


def test_untied_gpt_has_a_head_of_its_own() -> None:
    tied, untied = (
        sum(x.size for x in jax.tree.leaves(jax.eval_shape(gpt.build(gpt.GPTConfig(**TINY, tied=tied))[1])))
        for tied in (True, False)
    )
    assert untied - tied == TINY["width"] * TINY["vocab_size"]


def test_generate_keeps_the_prompt_and_slides_past_the_context() -> None:
    definition, init_fn = gpt.build(gpt.GPTConfig(**TINY))
    params, prompt = jax.jit(init_fn)(), tokens(1, 3)
    made = gpt.generate(definition, params, prompt, jax.random.key(0), length=12, temperature=1e-6)
    assert made.shape == (1, 15)
    np.testing.assert_array_equal(made[:, :3], prompt)
    apply = jax.jit(gpt.apply, static_argnums=0)
    for end in range(8, 15):  # at temperature zero each token is the likeliest after the last `context` ones
        logits = apply(definition, params, made[:, end - TINY["context"] : end])
        assert made[0, end] == jnp.argmax(logits[0, -1])
    logits = apply(definition, params, made[:, :8])  # and before, after all that there is
    np.testing.assert_array_equal(made[0, 3:8], jnp.argmax(logits[0, 2:7], axis=-1))


@pytest.fixture(scope="module")
def corpus() -> text.Corpus:
    return text.load()


def test_the_standard_library_is_several_megabytes_and_read_alike_each_time(corpus: text.Corpus) -> None:
    assert len(corpus.train) > 4_000_000 and len(corpus.validation) > 100_000
    again = text.load()
    np.testing.assert_array_equal(corpus.train, again.train)
    np.testing.assert_array_equal(corpus.validation, again.validation)


def test_a_file_is_for_training_or_for_validation(tmp_path: pathlib.Path) -> None:
    for number in range(100):
        (tmp_path / f"file{number}.py").write_text(f"<{number}>")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "file.py").write_text("<left out>")
    found = text.load(tmp_path)
    pieces = text.decode(found.train) + text.decode(found.validation)
    assert sorted(pieces.strip("<>").split("><")) == sorted(map(str, range(100)))
    with pytest.raises(FileNotFoundError, match="too few"):
        text.load(tmp_path / "tests")


def test_encoding_is_reversible() -> None:
    assert text.decode(text.encode("def f(x):\n\treturn 'ü€'")) == "def f(x):\n\treturn 'ü€'"


def test_batches_visit_every_window_once_an_epoch_and_resume_anywhere() -> None:
    stream = np.arange(4 * 30 + 1, dtype=np.uint8)
    batches = text.Batches(stream, batch_size=3, context=4)
    seen = [next(batches)["tokens"] for _ in range(20)]
    first, second = np.concatenate(seen[:10]), np.concatenate(seen[10:])
    assert first.shape == (30, 5)
    np.testing.assert_array_equal(np.sort(first[:, 0]), np.arange(0, 120, 4))
    np.testing.assert_array_equal(np.sort(second[:, 0]), np.arange(0, 120, 4))
    assert (first != second).any()
    resumed = text.Batches(stream, batch_size=3, context=4, position=13)
    np.testing.assert_array_equal(next(resumed)["tokens"], seen[13])
    with pytest.raises(ValueError, match="fewer than 31"):
        text.Batches(stream, batch_size=31, context=4)


def test_quickstart(tmp_path: pathlib.Path) -> None:
    done = run_script("quickstart.py", cwd=tmp_path)
    assert done.returncode == 0
    before, after = (float(x) for x in done.stdout.split("loss ")[-1].split("\n")[0].split(" -> "))
    assert after < 0.5 * before
    assert "on one device (64, 64)" in done.stdout or "on one device (8, 512)" in done.stdout


def test_the_step_in_the_readme_runs_and_learns() -> None:
    code = (ROOT / "README.md").read_text().split("```python\n")[1].split("```")[0]
    assert "zj.wrap_optimizer" in code and "zj.value_and_grad" in code
    x = jax.random.normal(jax.random.key(1), (64, 32))
    names = {
        "init_fn": lambda: {"w": jnp.zeros((32, 16))},
        "loss_fn": lambda params, batch: jnp.mean((batch @ params["w"] - batch[:, :16]) ** 2),
        "batches": [x] * 30,
    }
    exec(code, names)
    assert names["loss"] < 0.9 * names["loss_fn"](names["init_fn"](), x)
    assert names["params"]["w"].addressable_shards[0].data.size == 32 * 16 // 8


@pytest.mark.parametrize("stage", [*(pytest.param(s, marks=pytest.mark.full) for s in "012"), "3"])
def test_pjit_step(tmp_path: pathlib.Path, stage: str) -> None:
    done = run_script("pjit_step.py", "--stage", stage, "--steps", "6", cwd=tmp_path)
    assert done.returncode == 0
    assert "from the checkpoint" in done.stdout


SMALL = "--layers 1 --width 16 --heads 2 --context 16 --eval-every 3 --save-every 3".split()
TRAIN = ["train_gpt.py", "--config", str(EXAMPLES / "ds_config.json"), "--out", "here", *SMALL]


def test_train_gpt_shows_all_it_promises_and_fails_when_the_loss_does_not_fall(
    tmp_path: pathlib.Path,
) -> None:
    done = run_script(*TRAIN, "--demo", "--steps", "6", cwd=tmp_path)
    assert done.returncode == 1
    assert "FAILED: the validation loss fell by less than 40%" in done.stderr
    assert "resumed from step-3" in done.stdout and "does not repeat" not in done.stderr
    assert "ZeRO stage 3" in done.stdout and "--- sample ---" in done.stdout
    for name in ("loss.png", "memory.png"):
        assert (tmp_path / "here" / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.full
def test_train_gpt_goes_on_from_its_checkpoint_on_fewer_devices(tmp_path: pathlib.Path) -> None:
    assert run_script(*TRAIN, "--steps", "3", cwd=tmp_path).returncode == 0
    again = run_script(*TRAIN, "--steps", "6", "--resume", "--devices", "4", cwd=tmp_path)
    assert again.returncode == 0
    assert "N = 4" in again.stdout and "step 6: validation loss" in again.stdout
    assert "before training" not in again.stdout and "step 3:" not in again.stdout


def test_train_gpt_ends_with_one_line_where_there_is_nothing_to_resume(tmp_path: pathlib.Path) -> None:
    done = run_script(*TRAIN, "--resume", cwd=tmp_path)
    assert done.returncode == 1
    assert "CheckpointError: " in done.stderr and "Traceback" not in done.stderr


#: What the Trainer fills in is tested with the Trainer.
WRITTEN_OUT = [path for path in sorted(EXAMPLES.glob("ds_config*.json")) if path.stem != "ds_config_auto"]


@pytest.mark.parametrize("path", WRITTEN_OUT, ids=lambda path: path.stem)
def test_the_configs_are_accepted_and_differ_only_where_they_say(path: pathlib.Path) -> None:
    import zeroj as zj

    zj.Config.load(path)
    content, base = (json.loads(p.read_text()) for p in (path, EXAMPLES / "ds_config.json"))
    differing = {k for k in content.keys() | base.keys() if content.get(k) != base.get(k)}
    assert differing <= {"_comment", "zero_optimization", "gradient_accumulation_steps", "bf16"}
