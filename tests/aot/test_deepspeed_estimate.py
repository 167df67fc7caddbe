"""DeepSpeed's published vectors for its estimator."""

from __future__ import annotations

import pytest

from zeroj.aot.deepspeed_estimate import GIB, zero2, zero3
from zeroj.errors import PlanError


def test_the_published_table_of_t5_3b_on_eight_gpus() -> None:
    rows = zero3(2851 * 10**6, 32 * 10**6, gpus_per_node=8, nodes=1)
    found = [(round(r.host / GIB, 2), round(r.gpu / GIB, 2)) for r in rows]
    assert found == [
        (71.69, 0.12),
        (127.45, 0.12),
        (63.72, 0.78),
        (127.45, 0.78),
        (1.43, 6.09),
        (127.45, 6.09),
    ]
    assert str(rows[0]) == "   71.69GB |   0.12GB | offload_param=cpu , offload_optimizer=cpu , zero_init=1"


def test_t0_3b_on_one_gpu() -> None:
    assert zero3(2783 * 10**6, 65 * 10**6)[-1].gpu / GIB == pytest.approx(46.91, abs=0.02)


def test_zero_2() -> None:
    offload, none = zero2(10**9, gpus_per_node=8, nodes=2)
    assert (offload.gpu, offload.host) == (2e9, 64e9 * 1.5)
    assert (none.gpu, none.host) == (2e9 + int(18e9 / 16), 32e9 * 1.5)


def test_more_nodes_share_the_host_memory() -> None:
    one, four = zero3(10**9, 10**7, 8, 1), zero3(10**9, 10**7, 8, 4)
    assert four[0].host == one[0].host / 4


def test_no_gpu() -> None:
    with pytest.raises(PlanError, match="gpus_per_node=0"):
        zero2(10, gpus_per_node=0)
