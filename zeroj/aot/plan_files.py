"""The files that ``zeroj plan`` writes: the advised ds_config.json, and a picture of the memory."""

from __future__ import annotations

import pathlib
from typing import Any

from zeroj.aot.advise import Advice
from zeroj.errors import PlanError, ZerojError


def ds_config(found: Advice) -> dict[str, Any]:
    """Returns the advised choice as what ds_config.json holds.

    Raises:
      PlanError: where nothing fits, so that nothing is advised.
    """
    if found.advised is None:
        raise PlanError(f"no configuration to write: {found.reason}")
    choice, batch, machine = found.advised.choice, found.batch, found.machine
    zero: dict[str, Any] = {"stage": choice.stage}
    for key, place in (("offload_optimizer", choice.optimizer), ("offload_param", choice.params)):
        if place != "none":
            zero[key] = {"device": place, "pin_memory": True}
            zero[key] |= {"nvme_path": "/local_nvme"} if place == "nvme" else {}
    ratio = found.ratio(found.advised)
    if ratio is not None and ratio.value < 1:
        zero["offload_optimizer"]["ratio"] = ratio.value
    if choice.zeropp:
        zero |= {
            "zero_hpz_partition_size": machine.gpus_per_node,
            "zero_quantized_weights": True,
            "zero_quantized_gradients": True,
        }
    return {
        "train_micro_batch_size_per_gpu": batch.micro,
        "gradient_accumulation_steps": batch.accumulation,
        "train_batch_size": batch.micro * batch.accumulation * machine.num_gpus,
        "bf16": {"enabled": True},
        "zero_optimization": zero,
    }


def plot(found: Advice, path: str | pathlib.Path) -> None:
    """Writes stacked bars, bytes per GPU by part and choice, with a line at the GPU's memory, as PNG.

    Raises:
      ZerojError: where matplotlib, the extra ``zeroj[plot]``, is not installed.
    """
    try:
        import matplotlib.figure
    except ImportError as error:
        raise ZerojError("plotting needs matplotlib: pip install 'zeroj[plot]'") from error
    figure = matplotlib.figure.Figure(figsize=(9, 1.5 + 0.35 * len(found.estimates)), layout="constrained")
    axes = figure.subplots()
    names = [str(e.choice) + (" *" if e is found.advised else "") for e in found.estimates]
    left = [0.0] * len(names)
    for part in found.estimates[0].parts:
        widths = [e.parts[part] / 1e9 for e in found.estimates]
        if any(widths):
            axes.barh(names, widths, left=left, label=part)
            left = [a + b for a, b in zip(left, widths)]
    gpu = found.machine.gpu
    axes.axvline(gpu.memory_bytes / 1e9, color="black", linestyle="--", label=gpu.description)
    axes.invert_yaxis()
    axes.set_xlabel("GB a GPU")
    figure.suptitle(
        f"{found.sizes.params / 1e9:.1f}B parameters on {found.machine.num_gpus} GPUs (* advised)"
    )
    axes.legend(loc="lower right", fontsize="small")
    figure.savefig(path, format="png", dpi=120)
