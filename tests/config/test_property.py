"""Random configs either load, and can then be used in every way, or raise ConfigError; nothing else ever."""

from __future__ import annotations

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

import zeroj as zj
from tests.config import keys
from zeroj.config import Config
from zeroj.config.auto import ARGUMENTS
from zeroj.config.names import legal_paths
from zeroj.config.old import OLD, put
from zeroj.config.reader import read
from zeroj.config.schema import DsConfig
from zeroj.errors import ConfigError, PlanError
from zeroj.plan.precision import make_precision

pytestmark = pytest.mark.filterwarnings("ignore:.*old spelling")
ALL = keys.all_keys()
PATHS = [*legal_paths(DsConfig), *(old.path for old in OLD)]
LOAD = settings(max_examples=700, deadline=None, suppress_health_check=list(HealthCheck))

PARAMS = {"w": jax.ShapeDtypeStruct((16, 24), np.float32), "b": jax.ShapeDtypeStruct((24,), np.float32)}
SGD = optax.sgd(0.1)
MESH = zj.make_mesh(node=2, local=4)

junk = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["auto", "cpu", "nvme", "bf16", "Adam", "WarmupLR", 10**400, -1, 0, 1, 5e8, b"x", 1j]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=4,
)
arguments = st.dictionaries(st.sampled_from(ARGUMENTS), st.integers(0, 4) | st.booleans() | junk, max_size=4)


def use(data: Any, **given_arguments: Any) -> bool:
    """Load a config and use all of it; return whether it loaded."""
    try:
        config = Config.load(data, **given_arguments)
    except ConfigError as error:
        event("refused")
        assert str(error).count("\n  - ") >= 1
        return False
    event("loaded")
    assert "auto" not in str(config.zero)
    json.dumps(config.resolved())
    assert config.report() and config.needs() is not None and config.loss_scale.initial > 0
    tx, schedule = config.make_optimizer(), config.make_schedule()
    assert (tx is None) == (config.resolved()["optimizer"] is None)
    if schedule is not None:
        assert jnp.isfinite(schedule(3))
    try:
        sizes = config.batch.resolve(4, "local=4")
        assert sizes.train == sizes.micro * sizes.accumulation * 4
    except ConfigError:
        event("batch refused")
    plan(config, tx)
    return True


def plan(config: Config, tx: optax.GradientTransformation | None) -> None:
    """A config that loaded gives a plan, or says what of it these devices or this version cannot do."""
    try:
        precision = make_precision(
            config.precision,
            config.communication_dtype,
            config.grad_accum_dtype,
            low_master=config.master_dtype != "fp32",
        )
        made = zj.make_plan(PARAMS, tx or SGD, MESH, config.zero, precision=precision, aio=config.aio)
    except (ConfigError, PlanError) as error:
        event("plan refused")
        assert len(str(error)) > 40
        return
    event("planned")
    assert made.memory().device_total > 0


def merged(chosen: list[keys.Key], draw: Any) -> dict[str, Any]:
    """A file with a legal value for each of the chosen keys; those of later keys win."""
    data: dict[str, Any] = {}
    for key in chosen:
        file = key.file(draw(st.sampled_from(keys.legal_values(key))))
        for section, value in file.items():
            if isinstance(value, dict) and isinstance(data.get(section), dict) and section != "optimizer":
                data[section].update(value)
            else:
                data[section] = value
    return data


HARMLESS = [
    key for key in ALL if not key.is_section and key.row.status != "refused" and keys.legal_values(key)
]


@LOAD
@given(st.data(), st.lists(st.sampled_from(HARMLESS), max_size=6))
def test_legal_keys_in_random_combinations(data: Any, chosen: list[keys.Key]) -> None:
    use(merged(chosen, data.draw))


@LOAD
@given(st.data(), st.lists(st.tuples(st.sampled_from(PATHS), junk), max_size=6), arguments)
def test_random_values_under_legal_names(
    data: Any, chosen: list[Any], given_arguments: dict[str, Any]
) -> None:
    file: dict[str, Any] = {}
    for path, value in chosen:
        put(file, path, value)
    use(file, **given_arguments)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.text(max_size=8) | st.integers(), junk, max_size=4), arguments)
def test_random_dicts(file: Any, given_arguments: dict[str, Any]) -> None:
    use(file, **given_arguments)


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet='{}[]",:/*#\\ \n0a', max_size=40))
def test_random_text(text: str) -> None:
    try:
        data, _, _ = read("{" + text)
    except ConfigError:
        return
    assert isinstance(data, dict)


@settings(max_examples=200, deadline=None)
@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists, max_leaves=5))
def test_json_reads_back_as_itself(value: Any) -> None:
    data = {"a": value, "b": {"c": value}}
    assert read(json.dumps(data))[0] == data
    assert read(json.dumps(data, indent=1, ensure_ascii=False))[0] == data
