"""ZeRO++ on two simulated nodes of four devices: what must be equal is equal, what is quantised is near."""

from __future__ import annotations

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zeroj as zj
from tests import oracle
from tests.oracle import normal

pytestmark = pytest.mark.usefixtures("compile_fast")
WIDTH, HIDDEN, LAYERS, CLASSES = 64, 130, 3, 40
HPZ, QWZ, QGZ = (
    {"zero_hpz_partition_size": 4},
    {"zero_quantized_weights": True},
    {"zero_quantized_gradients": True},
)
ALL = HPZ | QWZ | QGZ


def first_params(stacked: bool) -> dict[str, Any]:
    """Matrices whose shards fill a block, some of them padded, and vectors; the embedding is the head too."""
    rng = np.random.default_rng(2)
    blocks: Any = [
        {
            "up": normal(rng, WIDTH, HIDDEN, scale=0.1),
            "bias": normal(rng, HIDDEN, scale=0.1),
            "down": normal(rng, HIDDEN, WIDTH, scale=0.1),
        }
        for _ in range(LAYERS)
    ]
    if stacked:
        blocks = jax.tree.map(lambda *leaves: np.stack(leaves), *blocks)
    return {
        "tokens": normal(rng, CLASSES, WIDTH, scale=0.3),
        "frozen": normal(rng, WIDTH, WIDTH, scale=0.1),
        "blocks": blocks,
    }


def loss_fn(params: Any, batch: Any, remat: bool = False) -> jax.Array:
    def block(x: jax.Array, p: Any) -> jax.Array:
        return x + jnp.tanh(x @ p["up"] + p["bias"]) @ p["down"]

    one = jax.checkpoint(block) if remat else block
    x = params["tokens"][batch["x"]] @ params["frozen"] * batch["by"][:, None].astype(params["frozen"].dtype)
    if isinstance(params["blocks"], list):
        for p in params["blocks"]:
            x = one(x, p)
    else:
        x, _ = jax.lax.scan(lambda x, p: (one(x, p), None), x, params["blocks"])
    logits = (x @ params["tokens"].T).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


def batches(count: int, size: int = 32) -> list[Any]:
    rng = np.random.default_rng(4)
    return [
        {
            "x": rng.integers(0, CLASSES, size).astype(np.int32),
            "y": rng.integers(0, CLASSES, size).astype(np.int32),
            "by": np.ones(size, np.float32),
        }
        for _ in range(count)
    ]


def plan_of(params: Any, mesh: Any = None, precision: str = "fp32", tx: Any = None, **zero: Any) -> zj.Plan:
    settings = zj.Zero(stage=3, stage3_param_persistence_threshold=0, **zero)
    scanned = ["blocks"] if isinstance(params["blocks"], dict) else None
    trainable = lambda path, leaf: "frozen" not in path  # noqa: E731
    mesh = mesh or zj.make_mesh(node=2, local=4)
    return zj.make_plan(
        params, tx or TX, mesh, settings, precision=precision, scanned=scanned, trainable=trainable
    )


TX = optax.adamw(1e-3)


def story(stacked: bool, remat: bool, folder: Any, **zero: Any) -> dict[str, np.ndarray]:
    """Ten steps of four micro-batches: evaluation after each, an edit, a skipped step, a restore elsewhere."""
    params = first_params(stacked)
    loss = functools.partial(loss_fn, remat=remat)
    plan = plan_of(params, **zero)
    make = functools.partial(
        zj.make_train_step, loss, TX, accumulation_steps=4, clip_norm=0.5, skip_nonfinite=True
    )
    step, evaluate, state = make(plan), zj.make_eval_step(loss, plan), zj.init_state(params, TX, plan)
    seen: list[Any] = []
    *data, held_out = batches(11)
    for number, batch in enumerate(data):
        if number == 3:
            edited = jax.tree.map(lambda x: x * 0.9, state.params)
            state = state._replace(params=edited)
        if number == 5:
            batch = batch | {"by": np.full_like(batch["by"], np.inf)}
        if number == 8:
            with zj.Checkpointer(folder) as checkpoints:
                checkpoints.save(state, plan, {}, wait=True)
                group = {"zero_hpz_partition_size": 2} if zero else {}
                plan = plan_of(params, zj.make_mesh(node=4, local=2), **(zero | group))
                state, _ = checkpoints.restore(plan)
            step, evaluate = make(plan), zj.make_eval_step(loss, plan)
        state, metrics = step(state, batch)
        after = evaluate(state, held_out)
        seen.append([metrics["loss"], metrics["grad_norm"], after["loss"], metrics["skipped"]])
    assert int(state.skipped) == 1
    whole = zj.full_params(state, plan)
    return {"seen": np.asarray(jax.device_get(seen)), "params": whole}


AWAY: dict[str, Any] = {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stacked", "remat", "away"),
    [
        pytest.param(True, True, {}, id="scan-remat"),
        pytest.param(True, True, AWAY, id="scan-remat-offload"),
        pytest.param(False, False, {}, id="unrolled", marks=pytest.mark.full),
        pytest.param(False, True, AWAY, id="unrolled-remat-offload", marks=pytest.mark.full),
    ],
)
def test_hpz_is_plain_stage_3_at_every_step(stacked: bool, remat: bool, away: Any, tmp_path: Any) -> None:
    """Plain stage 3 on the device: with offload the second shards wait in host memory."""
    wanted = story(stacked, remat, tmp_path / "plain")
    found = story(stacked, remat, tmp_path / "hpz", **HPZ, **away)
    finite = np.isfinite(wanted["seen"])
    assert not finite[5, 0] and finite[:, 2].all() and (wanted["seen"][finite] != 0).sum() >= 25
    np.testing.assert_array_equal(np.isfinite(found["seen"]), finite)
    np.testing.assert_allclose(found["seen"][finite], wanted["seen"][finite], rtol=1e-6)
    assert oracle.distance(found["params"], wanted["params"]) <= 1e-6


def by_index(params: Any, batch: Any, remat: bool = False, over: str = "fori") -> jax.Array:
    """The layers are taken out of their stacks by index, in a loop."""
    blocks = params["blocks"]

    def layer(i: Any, x: jax.Array) -> jax.Array:
        return x + jnp.tanh(x @ blocks["up"][i] + blocks["bias"][i]) @ blocks["down"][i]

    one = jax.checkpoint(layer) if remat else layer
    x = params["tokens"][batch["x"]] @ params["frozen"]
    if over == "fori":
        x = jax.lax.fori_loop(0, LAYERS, one, x)
    else:
        order = jnp.arange(LAYERS) if over == "scan" else jnp.array([2, 0, 1])
        x = jax.lax.scan(lambda x, i: (one(i, x), None), x, order)[0]
    logits = (x @ params["tokens"].T).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


@pytest.mark.parametrize("remat", [False, True])
def test_hpz_keeps_layers_that_a_loop_takes_by_index(remat: bool) -> None:
    """The backward loop takes what the forward loop left, under ``jax.checkpoint`` by an index of its own."""
    params, runs = first_params(stacked=True), []
    loss = functools.partial(by_index, remat=remat)
    for zero in ({}, HPZ):
        plan = plan_of(params, **zero)
        runs.append(oracle.train(oracle.Model(loss, params, batches(2)), TX, plan, accumulation=2))
    apart = oracle.run_distances(runs[1], runs[0])
    assert max(apart.values()) <= 1e-6, apart


@pytest.mark.parametrize(
    ("remat", "over", "away"),
    [
        (False, "fori", {}),
        (True, "fori", {}),
        (True, "scan", {}),
        (True, "fori", {"offload_param": {"device": "cpu"}}),
    ],
)
def test_by_index_each_param_crosses_the_network_once(remat: bool, over: str, away: Any) -> None:
    """In a step of two micro-batches too; ``zj.explain`` says so, param by param."""
    params = first_params(stacked=True)
    loss, plan = functools.partial(by_index, remat=remat, over=over), plan_of(params, **HPZ, **away)
    for accumulation in (1, 2):
        step = zj.make_train_step(loss, TX, plan, accumulation)
        state = zj.abstract_state(TX, plan)
        program = str(step.trace(state, batches(1)[0]).jaxpr)
        assert len(re.findall(r"all_gather\[[^\]]*?axis_name=\('node',\)", program)) == 5
        found = zj.explain(step, plan, state, batches(1)[0], micro_batches=accumulation)
        across = [found.across(leaf.path) for leaf in plan.leaves]
        assert across == pytest.approx([1] * 5, rel=0.05), found  # padding of the bias included
        assert found.times("blocks/up") == found.times("blocks/down") == 2 * accumulation
    assert "3 x 0.333 of it as float32 over local, at" in str(found)


def test_an_order_that_is_not_seen_crosses_the_network_again() -> None:
    """Right, and dearer: the backward pass of layers that are taken in an order of the program's own."""
    params = first_params(stacked=True)
    loss, plan = functools.partial(by_index, remat=True, over="order"), plan_of(params, **HPZ)
    step = zj.make_train_step(loss, TX, plan)
    found = zj.explain(step, plan, zj.abstract_state(TX, plan), batches(1)[0])
    assert found.across("blocks/up") == 2 and found.across("tokens") == 1
    assert "stays whole" not in str(found)  # layer by layer all the same


def gradient(precision: str = "fp32", stacked: bool = True, **zero: Any) -> tuple[float, Any]:
    params = first_params(stacked)
    plan = plan_of(params, precision=precision, **zero)
    stored = zj.shard_params(plan, params)
    loss, grads = jax.jit(zj.value_and_grad(loss_fn, plan))(stored, batches(1)[0])
    live = [leaf for leaf in plan.leaves if leaf.trainable]
    arrays = [x for x in jax.tree.leaves(grads) if x is not None]
    cut = [np.asarray(x)[tuple(slice(n) for n in leaf.shape)] for x, leaf in zip(arrays, live, strict=True)]
    return float(loss), {leaf.path: x for leaf, x in zip(live, cut, strict=True)}


@pytest.mark.parametrize(
    ("zero", "loss_within", "within"),
    [
        (QWZ, 3e-3, 0.05),
        (QGZ | {"zero_quantized_gradients_bits": 8}, 1e-6, 0.02),
        (QGZ, 1e-6, 0.2),
        (ALL, 3e-3, 0.2),
    ],
    ids=["qwZ", "qgZ-int8", "qgZ-int4", "all"],
)
def test_a_quantised_gradient_is_near_the_true_one(zero: Any, loss_within: float, within: float) -> None:
    wanted_loss, wanted = gradient()
    loss, found = gradient(**zero)
    assert loss == pytest.approx(wanted_loss, rel=loss_within)
    apart = {path: oracle.distance(found[path], wanted[path]) for path in wanted}
    assert max(apart.values()) <= within, apart
    assert max(apart.values()) > 0, "nothing was quantised"
    if not zero.get("zero_quantized_weights"):
        vectors = {path: apart[path] for path in apart if "bias" in path}
        assert max(vectors.values()) <= 1e-6, vectors


@pytest.mark.parametrize("nodes", [1, 2, 4])
@pytest.mark.parametrize("bits", [4, 8])
def test_a_gradient_of_ones_is_exactly_one(nodes: int, bits: int) -> None:
    """Neither hop may scale: the result is the mean, whichever way the eight devices are grouped."""
    params = {
        "even": np.ones((64, 128), np.float32),
        "padded": np.ones((67, 61), np.float32),
        "v": np.ones(9),
    }
    plan = zj.make_plan(
        jax.tree.map(lambda x: x.astype(np.float32), params),
        optax.sgd(1.0),
        zj.make_mesh(node=nodes, local=8 // nodes),
        zj.Zero(stage=3, stage3_param_persistence_threshold=0, zero_quantized_gradients_bits=bits, **QGZ),
    )
    assert len(plan.leaves[0].placement.wire.hops) == (1 if nodes == 1 else 2)

    def total(params: Any, batch: Any) -> jax.Array:
        return sum(jnp.sum(x) for x in jax.tree.leaves(params)) + 0 * jnp.mean(batch["x"])

    stored = zj.shard_params(plan, params)
    _, grads = jax.jit(zj.value_and_grad(total, plan))(stored, {"x": np.ones(16, np.float32)})
    for leaf, grad in zip(plan.leaves, jax.tree.leaves(grads), strict=True):
        cut = np.asarray(grad)[tuple(slice(n) for n in leaf.shape)]
        np.testing.assert_array_equal(cut, 1.0, err_msg=leaf.path)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_every_path_gives_the_compute_dtype_and_no_other_half(precision: str) -> None:
    """Frozen, tied, scanned and vector leaves alike; a bf16 program has no fp16 in it."""
    dtypes: set[Any] = set()

    def watched(params: Any, batch: Any) -> jax.Array:
        dtypes.update(x.dtype for x in jax.tree.leaves(params))
        return loss_fn(params, batch)

    params = first_params(stacked=True)
    plan = plan_of(params, precision=precision, **ALL)
    step = zj.make_train_step(watched, TX, plan, accumulation_steps=2)
    program = str(step.trace(zj.abstract_state(TX, plan), batches(1)[0]).jaxpr)
    wanted, other = {"bf16": ("bf16", "f16["), "fp16": ("f16", "bf16[")}[precision]
    assert dtypes == {jnp.dtype(jnp.bfloat16 if precision == "bf16" else jnp.float16)}
    assert f"{wanted}[" in program and f" {other}" not in program and f":{other}" not in program
    assert "i8[" in program


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp16", pytest.param("bf16", marks=pytest.mark.full)])
def test_all_three_train_in_half_precision_with_accumulation_and_clipping(precision: str) -> None:
    """The loss falls as it does at plain stage 3, and an overflow is seen through the quantiser."""
    ends = []
    for zero in ({}, ALL):
        params = first_params(stacked=True)
        plan = plan_of(params, precision=precision, **zero)
        step = zj.make_train_step(loss_fn, TX, plan, accumulation_steps=2, clip_norm=1.0)
        state = zj.init_state(params, TX, plan)
        first, bad = batches(2)
        state, metrics = step(state, first)
        first_loss = float(metrics["loss"])
        for _ in range(11):
            state, metrics = step(state, first)
        ends.append(float(metrics["loss"]))
        skipped = int(state.skipped)
        before = jax.device_get(state.params)
        state, metrics = step(state, bad | {"by": np.full_like(bad["by"], np.inf)})
        assert int(metrics["skipped"]) == skipped + 1 and not metrics["applied"]
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.params), before)
    assert ends[1] < 0.8 * first_loss and ends[1] == pytest.approx(ends[0], rel=0.05), ends


@pytest.mark.slow
def test_all_three_with_params_and_state_in_host_memory_are_the_same() -> None:
    """Offload moves bytes, not values: the quantised steps are those of the device."""
    params = first_params(stacked=True)
    runs = [
        oracle.train(oracle.Model(loss_fn, params, batches(4)), TX, plan_of(params, **zero), accumulation=2)
        for zero in (ALL, ALL | AWAY)
    ]
    apart = oracle.run_distances(runs[1], runs[0])
    assert max(apart.values()) <= 1e-6, apart


def together(plan: zj.Plan, other: zj.Plan, data: list[Any], folder: Any) -> tuple[list[float], Any]:
    """Losses of a run that is saved in the middle, its last update skipped, and goes on under another plan."""
    loss, losses = functools.partial(loss_fn, remat=True), []
    state = zj.init_state(first_params(stacked=True), TX, plan)
    for number, batch in enumerate(data):
        if number in (0, len(data) // 2):
            if number:
                with zj.Checkpointer(folder) as checkpoints:
                    checkpoints.save(state, plan, wait=True)
                    state, _ = checkpoints.restore(other)
            step = zj.make_train_step(loss, TX, other if number else plan, 2, clip_norm=0.5)
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    assert int(state.skipped) == 1
    return losses, state


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The errors of quantised gradients")
def test_everything_together_learns_as_plain_stage_3(tmp_path: Any) -> None:
    """All of ZeRO++, LoCo, offload, bf16, remat, micro-batches, clipping, a frozen leaf; then on another mesh."""
    params, ends = first_params(stacked=True), []
    (first, *_), loco = batches(1), {"zeropp_loco_param": {}}
    data = [first] * 12
    data[5] = first | {"by": np.full_like(first["by"], np.inf)}
    for name, zero, moved in (("plain", {}, {}), ("all", ALL | AWAY | loco, {"zero_hpz_partition_size": 2})):
        plan = plan_of(params, precision="bf16", **zero)
        other = plan_of(params, zj.make_mesh(node=4, local=2), precision="bf16", **(zero | moved))
        losses, state = together(plan, other, data, tmp_path / name)
        whole = zj.full_params(state, other)
        np.testing.assert_array_equal(
            whole["frozen"], params["frozen"].astype(jnp.bfloat16).astype(np.float32)
        )
        ends.append(losses)
    assert ends[1][-1] == pytest.approx(ends[0][-1], rel=0.05) and ends[1][-1] < 0.95 * ends[1][0], ends


@pytest.mark.slow
def test_mics_is_plain_stage_3_in_groups() -> None:
    """Groups of four hold all of the state; four micro-batches, then one sum over the groups."""
    params = first_params(stacked=True)
    runs, plans = [], []
    for zero in ({}, {"mics_shard_size": 4}):
        plan = plan_of(params, **zero)
        model = oracle.Model(loss_fn, params, batches(4))
        runs.append(oracle.train(model, TX, plan, accumulation=4, clip=1.0))
        plans.append(plan)
    apart = oracle.run_distances(runs[1], runs[0])
    assert max(apart.values()) <= 1e-6, apart
    assert plans[1].replica_axes == ("node",) and plans[1].degree == 8
    assert plans[1].memory().resident == pytest.approx(2 * plans[0].memory().resident, rel=0.02)
    assert "2 groups are alike" in str(plans[1])


@pytest.mark.parametrize("extra", [{}, pytest.param(QWZ, marks=pytest.mark.full)], ids=["plain", "qwZ"])
def test_mics_gathers_over_the_nodes_of_a_group_first(extra: Any) -> None:
    """Two groups of two nodes of two: the same values, and no gather over the whole group at once."""
    params, runs, texts = first_params(stacked=True), [], []
    for hierarchical in (False, True):
        zero = {"mics_shard_size": 4, "mics_hierarchical_params_gather": hierarchical, **extra}
        plan = plan_of(params, zj.make_mesh(node=4, local=2), **zero)
        model = oracle.Model(loss_fn, params, batches(2))
        runs.append(oracle.train(model, TX, plan, accumulation=2, clip=1.0))
        step = zj.make_train_step(loss_fn, TX, plan)
        texts.append(str(step.trace(zj.abstract_state(TX, plan), batches(1)[0]).jaxpr))
    apart = oracle.run_distances(runs[1], runs[0])
    assert max(apart.values()) <= (5e-3 if extra else 1e-6), apart
    assert dict(plan.mesh.shape) == {"node": 2, "span": 2, "local": 2} and plan.replica_axes == ("node",)
    assert "gathered over the 2 nodes of a group first" in str(plan)
    assert "secondary" not in plan.memory().device
    gathers = [set(re.findall(r"all_gather\[[^\]]*?axis_name=(\([^)]*\))", text)) for text in texts]
    assert gathers == [{"('local',)"}, {"('local',)", "('span',)"}]


def test_mics_within_a_node_has_nothing_to_gather_first() -> None:
    zero = {"mics_shard_size": 4, "mics_hierarchical_params_gather": True}
    plan = plan_of(first_params(True), **zero)
    assert dict(plan.mesh.shape) == {"node": 2, "local": 4}
    assert "mics_hierarchical_params_gather changes nothing" in str(plan)


@pytest.mark.parametrize(
    ("zero", "mesh"), [({"zero_hpz_partition_size": 2}, (4, 2)), ({"mics_shard_size": 2}, (4, 2))]
)
def test_a_group_smaller_than_a_node_cuts_the_mesh_anew(zero: Any, mesh: tuple[int, int]) -> None:
    plan = plan_of(first_params(False), **zero)
    assert tuple(plan.mesh.shape.values()) == mesh
    assert [d.id for d in plan.mesh.devices.flat] == list(range(8))


def test_memory_shows_the_second_shard_of_hpz() -> None:
    """Two bytes a param over the devices of a node; half of that where it is kept as int8."""
    params = first_params(stacked=True)
    count = sum(x.size for x in jax.tree.leaves(params))
    plan = plan_of(params, precision="bf16", **HPZ)
    assert plan.memory().device["secondary"] == pytest.approx(2 * count / 4, rel=0.02)
    packed = plan_of(params, precision="bf16", **HPZ, **QWZ).memory().device["secondary"]
    assert packed == pytest.approx(count / 4, rel=0.15)  # padding to blocks, in small shards
    assert "secondary" not in plan_of(params, precision="bf16", **QWZ).memory().device
    assert "hpZ: gathered over node once a step, then over local alone" in str(plan)


@pytest.mark.parametrize("extra", [{}, QWZ], ids=["plain", "qwZ"])
def test_with_params_off_the_device_so_is_the_second_shard(extra: Any) -> None:
    """As it was gathered, int8 under qwZ: handed from loop to loop through host memory, and counted there."""
    params = first_params(stacked=True)
    here = plan_of(params, precision="bf16", **HPZ, **extra)
    plan = plan_of(params, precision="bf16", **HPZ, **extra, offload_param={"device": "cpu"})
    memory = plan.memory()
    assert memory.device["secondary"] == 0
    assert memory.host["secondary"] == 8 * here.memory().device["secondary"]
    assert "then over local alone, from host memory" in str(plan)
    step = zj.make_train_step(functools.partial(loss_fn, remat=True), TX, plan)
    program = str(step.trace(zj.abstract_state(TX, plan), batches(1)[0]).jaxpr)
    kept = f"i8<host>[{LAYERS},2," if extra else f"bf16<host>[{LAYERS},16,"
    assert kept in program, re.findall(r"\w+<host>\[[^]]*\]", program)
    assert len(re.findall(r"all_gather\[[^\]]*?axis_name=\('node',\)", program)) == 5


def test_the_plan_says_what_is_not_quantised_and_why() -> None:
    text = str(plan_of(first_params(stacked=False), **ALL))
    assert "gathers int8, gradients int8 over local, int4 over node" in text
    assert "not quantised: a vector" in text


REFUSED: list[tuple[Any, Any, str]] = [
    ({"zero_hpz_partition_size": 8}, (1, 8), "all devices are in one node"),
    ({"zero_hpz_partition_size": 3}, (2, 4), "has to divide the 4 devices of a node"),
    ({"mics_shard_size": 3}, (2, 4), "does not divide the 8 devices"),
]


@pytest.mark.parametrize(("zero", "mesh", "why"), REFUSED, ids=lambda x: x if isinstance(x, str) else None)
def test_what_does_not_fit_is_refused_with_the_reason(zero: Any, mesh: Any, why: str) -> None:
    with pytest.raises(zj.ZerojError, match=why):
        plan_of(first_params(False), zj.make_mesh(node=mesh[0], local=mesh[1]), **zero)


def test_the_global_view_refuses_what_it_would_not_do() -> None:
    plan = plan_of(first_params(False), **QWZ)
    with pytest.raises(zj.PlanError, match="partitioner"):
        zj.make_train_step(loss_fn, TX, plan, loss_over="global")
