"""The advised offload_optimizer.ratio: the least that fits the GPU, or what hides behind the update if that is more."""

from __future__ import annotations

import dataclasses

import pytest

import zeroj as zj
from zeroj.aot.advise import advise
from zeroj.aot.choices import Batch, Choice, Machine
from zeroj.aot.closed_form import estimate, update_seconds, usable_memory
from zeroj.aot.hardware import Rate, find
from zeroj.aot.plan_files import ds_config
from zeroj.aot.ratio import Ratio, advise_ratio
from zeroj.aot.sizes import from_numbers

MODEL, BATCH = from_numbers(13e9, 40, 5120), Batch()
MACHINE = Machine(find("h100"), 1, 8, host_memory=2e12, nvme=0)


def machine(memory: float = 80e9, link: float | None = None) -> Machine:
    gpu = dataclasses.replace(find("h100"), memory_bytes=int(memory))
    if link:
        gpu = dataclasses.replace(gpu, pcie=Rate(link, 1.0, "of this test"))
    return dataclasses.replace(MACHINE, gpu=gpu)


def found(choice: Choice, cluster: Machine) -> Ratio:
    ratio = advise_ratio(choice, MODEL, BATCH, cluster)
    assert ratio is not None
    return ratio


def tight(choice: Choice, share: float) -> float:
    """Bytes of a GPU that holds exactly ``share`` of the state beside the rest."""
    need = estimate(dataclasses.replace(choice, ratio=1 - share), MODEL, BATCH, MACHINE).device
    return need / 0.92 + 10


@pytest.mark.parametrize(
    "choice", [Choice(1, "cpu"), Choice(2, "cpu"), Choice(3, "cpu"), Choice(3, "cpu", "cpu")]
)
def test_no_more_is_offloaded_than_the_memory_asks_for(choice: Choice) -> None:
    cluster = machine(tight(choice, 0.4))
    ratio = found(choice, cluster)
    assert ratio.value == ratio.fits == pytest.approx(0.6, abs=0.01)
    assert ratio.estimate.device <= usable_memory(cluster)
    less = dataclasses.replace(choice, ratio=ratio.value - 0.02)
    assert estimate(less, MODEL, BATCH, cluster).device > usable_memory(cluster)
    assert ratio.estimate.seconds < estimate(choice, MODEL, BATCH, cluster).seconds


@pytest.mark.parametrize("link", [20e9, 50e9, 400e9])
def test_where_all_fits_as_much_is_offloaded_as_hides_behind_the_update(link: float) -> None:
    ratio = found(Choice(2, "cpu"), machine(link=link))
    assert ratio.fits == 0 and ratio.value == ratio.hides
    kernels, moves = update_seconds(Choice(2, "cpu", ratio=ratio.value), MODEL, BATCH, machine(link=link))
    assert moves <= kernels
    kernels, moves = update_seconds(
        Choice(2, "cpu", ratio=ratio.value + 0.01), MODEL, BATCH, machine(link=link)
    )
    assert moves > kernels


def test_a_fast_link_hides_everything() -> None:
    assert found(Choice(2, "cpu"), machine(link=1e13)).value == 1


def test_without_an_optimizer_on_the_host_or_room_there_is_no_ratio() -> None:
    assert advise_ratio(Choice(3), MODEL, BATCH, MACHINE) is None
    assert advise_ratio(Choice(3, "nvme"), MODEL, BATCH, MACHINE) is None
    assert advise_ratio(Choice(2, "cpu"), MODEL, BATCH, machine(10e9)) is None


def test_the_advice_names_it_and_the_file_sets_it() -> None:
    cluster = machine(tight(Choice(3, "cpu"), 0.5))
    advice = advise(MODEL, BATCH, cluster)
    assert advice.advised is not None and advice.advised.choice == Choice(3, "cpu")
    value = found(Choice(3, "cpu"), cluster).value
    assert any(f'"ratio": {value:.2f} in offload_optimizer' in note for note in advice.notes)
    config = zj.Config.load(ds_config(advice))
    assert config.zero.offload_optimizer.ratio == value
    assert f"{value:.2f}" in next(line for line in str(advice).splitlines() if line.startswith("*"))
