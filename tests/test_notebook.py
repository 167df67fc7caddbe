"""The notebook runs, prints what it shows, and learns what it says."""

from __future__ import annotations

import json
import os
import pathlib
import re

import jax
import pytest

from tests.notebooks import printed, stored

NOTEBOOK = pathlib.Path(__file__).parent.parent / "examples" / "quickstart.ipynb"


def without_numbers(text: str) -> list[str]:
    """Lines with every number made the same; those of times, which name what took longest, left out."""
    lines = [re.sub(r"\s+", " ", re.sub(r"[\d.,:]+(e[+-]\d+)?", "#", line)) for line in text.splitlines()]
    return [line for line in lines if not line.startswith("time")]


@pytest.mark.slow
def test_the_notebook_prints_what_it_shows() -> None:
    cache = {
        "JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
    }
    found = printed(NOTEBOOK, {**os.environ, "JAX_PLATFORMS": "cpu", **cache})
    shown = stored(NOTEBOOK)
    assert [without_numbers(text) for text in found] == [without_numbers(text) for text in shown]
    assert found[0] == shown[0] and found[2] == shown[2]  # devices, and bytes a device
    (loss,) = re.findall(r"^eval_loss ([\d.]+)", found[4], re.MULTILINE)
    assert float(loss) < 0.2
    assert "[[5, 6, 7, 8, 9, 10], [5, 7, 9, 11, 13, 15]]" in found[4]


def test_it_is_a_notebook() -> None:
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    for target in re.findall(r"\]\(([^)#]+)\)", NOTEBOOK.read_text(encoding="utf-8")):
        assert (NOTEBOOK.parent / target).exists(), target
