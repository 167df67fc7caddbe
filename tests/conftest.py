"""Eight simulated CPU devices, set up before JAX starts its backend, for every test."""

from __future__ import annotations

import os
import pathlib
import platform
from collections.abc import Iterator

import jax
import pytest

FLAGS = os.environ.get("XLA_FLAGS", "").split()
# MLIR fusion emitters take three quarters of the time that XLA:CPU compiles small programs, and the tests do
# little else. XLA reads its flags when the backend starts; newer versions do not know this one and would abort.
if jax.__version_info__ < (0, 11):
    FLAGS.append("--xla_cpu_use_fusion_emitters=false")
# With fused multiply-adds the same arithmetic rounds differently in two programs: LLVM chooses which product of a
# sum it fuses, by what else is in the kernel. Without them what differs is zeroj's, and bit for bit can be asked.
if platform.machine() in ("x86_64", "AMD64") and not any(
    flag.startswith("--xla_cpu_max_isa") for flag in FLAGS
):
    FLAGS.append("--xla_cpu_max_isa=AVX")
os.environ["XLA_FLAGS"] = " ".join(FLAGS)
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

# From jax 0.12 on a program that comes from the cache may run collectives that do not depend on each other in another
# order on each simulated device, which then wait for each other for ever: see docs/choices.md.
_CACHE = pathlib.Path(__file__).parent.parent / ".cache" / "jax"
if jax.__version_info__ < (0, 11):
    jax.config.update("jax_compilation_cache_dir", os.environ.get("ZEROJ_TEST_CACHE", str(_CACHE)))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


@pytest.fixture(scope="session", autouse=True)
def eight_devices() -> list[jax.Device]:
    """The simulated devices; fails, rather than skips, where there are not eight."""
    devices = jax.devices()
    assert len(devices) == 8, f"the tests need 8 simulated CPU devices, found {len(devices)}"
    return devices


@pytest.fixture(scope="module")
def compile_fast() -> Iterator[None]:
    """For modules whose programs run for milliseconds: their machine code is not worth seconds of optimizing."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
