"""Floating-point operations of a step, from the compiled program: DeepSpeed's flops_profiler."""

from __future__ import annotations

from zeroj.monitor.program import Program


def flops_text(program: Program, seconds: float, params: int, step: int) -> str:
    """The report of one step.

    Args:
        program: the compiled step.
        seconds: how long the step took, compiling left out.
        params: number of parameters.
        step: which step it was.
    """
    matrix, whole = program.matrix_flops, program.matrix_flops * program.devices
    lines = [
        f"flops profile of step {step}, from the compiled program",
        f"  parameters                                  {params:,}",
        f"  devices                                     {program.devices}",
        f"  step                                        {seconds * 1e3:.2f} ms",
        f"  matrix products, per device and step        {_flops(matrix)} (loops multiplied out)",
        f"  matrix products, all devices                {_flops(whole)}",
        f"  rate, per device                            {_flops(matrix / seconds)}/s",
        f"  XLA's count, per device                     {_flops(program.xla_flops)} "
        "(elementwise operations included, a loop's body once)",
    ]
    return "\n".join(lines)


def _flops(count: float) -> str:
    for unit in ("", "k", "M", "G", "T"):
        if count < 1000:
            return f"{count:.2f} {unit}FLOP"
        count /= 1000
    return f"{count:.2f} PFLOP"
