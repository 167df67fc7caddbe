"""The advice on ordinary clusters, against the field's rules of thumb."""

from __future__ import annotations

import pytest

from zeroj.aot.advise import Advice, advise, rule_of_thumb
from zeroj.aot.choices import Batch, Choice, Machine
from zeroj.aot.hardware import find
from zeroj.aot.sizes import from_numbers

MODELS = {
    1.3: (1.3e9, 24, 2048),
    6.7: (6.7e9, 32, 4096),
    13: (13e9, 40, 5120),
    20: (20e9, 44, 6144),
    30: (30e9, 48, 7168),
    70: (70e9, 80, 8192),
    175: (175e9, 96, 12288),
}


def advice(
    billions: float, gpus: int, gigabits: float | None = None, nvme: float = 4e12, accumulation: int = 1
) -> Advice:
    gpu = find("a100-80")
    if gigabits:
        gpu = gpu.with_network(gigabits, 8)
    machine = Machine(gpu, gpus // 8, 8, 1e12, nvme)
    return advise(
        from_numbers(*MODELS[billions]), Batch(micro=4, sequence=2048, accumulation=accumulation), machine
    )


@pytest.mark.parametrize("gpus", [8, 16, 64])
@pytest.mark.parametrize("billions", sorted(MODELS))
def test_the_rules_by_size_hold_or_the_output_says_why_not(billions: float, gpus: int) -> None:
    found = advice(billions, gpus)
    rule, choice = rule_of_thumb(found.sizes)
    assert found.advised is not None and found.advised.fits
    differs = [n for n in found.notes if f"({rule}) differs: " in n]
    assert bool(differs) == (found.advised.choice != choice)
    assert all(len(n.split("differs: ")[1]) > 10 for n in differs)


@pytest.mark.parametrize(
    ("billions", "gpus", "choice"),
    [
        (6.7, 8, Choice(1)),
        (6.7, 16, Choice(1)),
        (6.7, 64, Choice(1)),
        (13, 16, Choice(2)),
        (13, 64, Choice(2)),
        (70, 16, Choice(3, "cpu")),
    ],
)
def test_where_the_rules_agree_with_the_numbers_when_accumulating(
    billions: float, gpus: int, choice: Choice
) -> None:
    found = advice(billions, gpus, accumulation=4)
    assert found.advised is not None and found.advised.choice == choice


def test_20_billion_fit_at_stage_1_as_one_micro_batch_needs_no_whole_gradients() -> None:
    found = advice(20, 16)
    assert found.advised is not None and found.advised.choice == Choice(1)
    assert "stage 1 fits too, is as fast, and has fewer parts" in found.notes[0]


def test_30_billion_fit_at_stage_3_without_offload() -> None:
    found = advice(30, 8)
    assert found.advised is not None and found.advised.choice == Choice(3)
    assert "stage 3 fits and is faster" in found.notes[0]


@pytest.mark.parametrize("billions", [6.7, 13, 20, 30])
def test_the_rules_by_network(billions: float) -> None:
    fast, slow, slowest = (advice(billions, 16, g).advised for g in (3200, 10, 1))
    assert fast is not None and not fast.choice.zeropp
    assert slow is not None and slow.choice.zeropp
    assert slowest is not None
    assert "get a better network first" in " ".join(advice(billions, 16, 1).notes)


def test_where_zeropp_pays_at_100_gigabits_the_output_says_why() -> None:
    found = advice(13, 16, 100)
    assert found.advised is not None and found.advised.choice.zeropp
    assert any("100 Gb/s a node and more: no ZeRO++) differs: stage 1 takes" in n for n in found.notes)


def test_nothing_fits() -> None:
    machine = Machine(find("a100-40"), 1, 1, 64e9, 0)
    found = advise(from_numbers(*MODELS[175]), Batch(), machine)
    assert found.advised is None
    assert "nothing fits: nearest is" in str(found) and "Take more GPUs" in found.reason


def test_the_table_has_every_choice_and_marks_the_advised_one() -> None:
    found = advice(13, 16)
    text = str(found)
    assert all(str(e.choice) in text for e in found.estimates)
    assert f"* {found.advised.choice}" in text if found.advised else False
    assert "not a measurement" in text and "GPU over by" in text
