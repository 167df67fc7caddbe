"""What a state carries beside params and optimizer, from a checkpoint: the model's own state, and LoCo's errors."""

from __future__ import annotations

import warnings
from typing import Any

import jax

from zeroj.checkpoint import database
from zeroj.checkpoint.layout import error_targets, key_data, small_targets
from zeroj.checkpoint.manifest import Manifest
from zeroj.errors import CheckpointError
from zeroj.plan.feedback import errors_struct, first_errors
from zeroj.plan.plan import Plan


def saved_model_state(folder: str, manifest: Manifest, plan: Plan, like: Any) -> Any:
    """The saved state of the model, whole on every device.

    Args:
        folder: where the arrays lie.
        manifest: their description.
        plan: the plan.
        like: arrays, keys or ShapeDtypeStructs in the tree, shapes and dtypes of the state, or a function of
            nothing that makes them.

    Raises:
        CheckpointError: it is not the tree that was saved; lists every leaf that differs.
    """
    like = jax.eval_shape(like) if callable(like) else like
    words = jax.tree.map(lambda x: jax.eval_shape(lambda x: key_data(x)[0], x), like)
    targets = small_targets(plan, {"model_state": words})
    saved = {n: leaf.shape for n, leaf in manifest.leaves.items() if n.split("/")[0] == "model_state"}
    given = {t.name: t.shape for t in targets}
    faults = [f"{n}: saved {saved[n]}, not given" for n in saved.keys() - given.keys()]
    faults += [f"{n}: given {given[n]}, not saved" for n in given.keys() - saved.keys()]
    both = saved.keys() & given.keys()
    faults += [f"{n}: saved {saved[n]}, given {given[n]}" for n in both if saved[n] != given[n]]
    if faults:
        raise CheckpointError(
            "The model_state of the checkpoint is not the one given:\n  - "
            + "\n  - ".join(sorted(faults))
            + "\n"
            "Pass it as to zj.init_state: restore(..., model_state=...)."
        )
    if not targets:
        return like
    found = jax.tree.unflatten(jax.tree.structure(words), database.read(folder, targets))
    return jax.tree.map(_as_key, like, found)


def saved_errors(folder: str, manifest: Manifest, plan: Plan) -> Any:
    """What quantising lost of the gradients so far, as saved; zeros where it was set to zero last, and zeros and a
    warning where it is another mesh's."""
    targets = error_targets(plan)
    if not targets:
        return ()
    saved = {n: leaf.shape for n, leaf in manifest.leaves.items() if n.split("/")[0] == "errors"}
    if saved == {t.name: t.shape for t in targets} and manifest.mesh == dict(plan.mesh.shape):
        if "feeds" in manifest.leaves:
            flag = small_targets(plan, {"feeds": jax.ShapeDtypeStruct((), bool)})
            if not bool(next(iter(database.read(folder, flag)))):
                return first_errors(plan)
        tree = jax.tree.structure(errors_struct(plan))
        return jax.tree.unflatten(tree, database.read(folder, targets))
    why = f"they are those of mesh {manifest.mesh}" if saved else "the checkpoint holds none"
    warnings.warn(
        f"The errors of quantised gradients (zeropp_loco_param) start from zero: {why}, the plan's mesh is "
        f"{dict(plan.mesh.shape)}.",
        stacklevel=4,
    )
    return first_errors(plan)


def _as_key(like: Any, words: jax.Array) -> jax.Array:
    if not jax.dtypes.issubdtype(like.dtype, jax.dtypes.prng_key):
        return words
    return jax.random.wrap_key_data(words, impl=str(jax.random.key_impl(like)))
