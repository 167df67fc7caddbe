"""The description that stands beside the arrays of a checkpoint: readable by people and without devices."""

from __future__ import annotations

import base64
import json
import pathlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from typing import Any

import jax
import numpy as np

from zeroj.checkpoint.arrays import ArraySpec
from zeroj.checkpoint.layout import key_data, param_name
from zeroj.errors import CheckpointError
from zeroj.plan.plan import Plan
from zeroj.step.state import TrainState

#: Raised by one whenever an older zeroj could not read a newer checkpoint.
FORMAT = 1
MANIFEST_FILE = "manifest.json"
EXTRA_FILE = "extra.json"


@dataclass(frozen=True)
class Leaf:
    """One stored array: its user shape and dtype; for params also the user's dtype, and whether it trains."""

    shape: tuple[int, ...]
    dtype: str
    user_dtype: str = ""
    trainable: bool = True


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint is.

    Attributes:
        serial: 1 for the first checkpoint of a folder, one more for each later one: the order of saving.
        step: the step under which it was saved.
        tags: the user's names for it.
        saved_at: seconds since 1970.
        stage: ZeRO stage of the run that saved it; like ``degree`` and ``mesh`` for people only.
        degree: its N.
        mesh: its axes.
        precision: name of its precision.
        rng: name of the random generator of its key.
        versions: of zeroj, jax, optax and orbax.
        metrics: numbers given by the user, by which the best checkpoint is found.
        leaves: name -> description of every array.
    """

    serial: int
    step: int
    tags: tuple[str, ...]
    saved_at: float
    stage: int
    degree: int
    mesh: dict[str, int]
    precision: str
    rng: str
    versions: dict[str, str]
    metrics: dict[str, float]
    leaves: dict[str, Leaf]
    format: int = field(default=FORMAT)

    def to_json(self) -> str:
        """As text."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def read(cls, folder: pathlib.Path | str) -> Manifest:
        """Reads the manifest of the checkpoint whose arrays lie in ``folder``.

        Raises:
            CheckpointError: it is missing, damaged, or of a newer zeroj.
        """
        file = _path(folder) / MANIFEST_FILE
        try:
            raw = json.loads(file.read_text())
            version = raw.get("format", 0)
            leaves = {k: Leaf(**{**v, "shape": tuple(v["shape"])}) for k, v in raw.get("leaves", {}).items()}
            if version == FORMAT:
                return cls(**{**raw, "leaves": leaves, "tags": tuple(raw["tags"])})
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise CheckpointError(f"{file} is missing or damaged ({error}): no usable checkpoint.") from error
        raise CheckpointError(
            f"{file} has format {version}; this zeroj reads {FORMAT}. Install a newer zeroj."
        )


def describe(
    plan: Plan,
    state: TrainState,
    specs: Sequence[ArraySpec],
    *,
    serial: int,
    step: int,
    tags: Sequence[str],
    metrics: Mapping[str, Any],
) -> Manifest:
    """The manifest of a state about to be saved."""
    params = {param_name(leaf): leaf for leaf in plan.leaves}
    leaves = {}
    for spec in specs:
        param = params.get(spec.name)
        user_dtype, trainable = (param.dtype.name, param.trainable) if param else ("", True)
        leaves[spec.name] = Leaf(spec.shape, spec.dtype.name, user_dtype, trainable)
    return Manifest(
        serial=serial,
        step=step,
        tags=tuple(tags),
        saved_at=time.time(),
        stage=plan.zero.stage,
        degree=plan.degree,
        mesh=dict(plan.mesh.shape),
        precision=plan.precision.name,
        rng=key_data(state.rng)[1],
        versions={name: _version(name) for name in ("zeroj", "jax", "optax", "orbax-checkpoint")},
        metrics={name: float(value) for name, value in metrics.items()},
        leaves=leaves,
    )


def extra_to_json(extra: Mapping[str, Any]) -> str:
    """The user's own data as text; bytes and numpy scalars are taken too.

    Raises:
        CheckpointError: something in it is no plain data.
    """
    try:
        return json.dumps(extra, default=_encode)
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"extra must be plain data (dicts with text keys, lists, numbers, text, bytes): {error}"
        ) from error


def extra_from_json(text: str) -> dict[str, Any]:
    """The inverse of :func:`extra_to_json`."""
    return json.loads(text, object_hook=_decode)


def read_extra(folder: pathlib.Path | str) -> dict[str, Any]:
    """The user's own data of the checkpoint whose arrays lie in ``folder``."""
    file = _path(folder) / EXTRA_FILE
    try:
        return extra_from_json(file.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} is missing or damaged: {error}") from error


def _path(folder: Any) -> Any:
    return pathlib.Path(folder) if isinstance(folder, str) else folder


def _encode(value: Any) -> Any:
    if isinstance(value, bytes):
        return {"__bytes__": base64.b64encode(value).decode()}
    if isinstance(value, np.generic) or (isinstance(value, jax.Array) and value.ndim == 0):
        return np.asarray(value).item()
    raise TypeError(f"{type(value).__name__} {value!r:.80} cannot be stored")


def _decode(value: dict[str, Any]) -> Any:
    return base64.b64decode(value["__bytes__"]) if value.keys() == {"__bytes__"} else value


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed as a package"
