"""The sections "offload_optimizer", "offload_param" and "aio": state that does not live on the device."""

from __future__ import annotations

from typing import Literal

from zeroj.config.rows import Bool, Float, Int, Section, Text, honoured, not_needed, refused

Device = Literal["none", "cpu", "nvme"]


class OffloadOptimizer(Section):
    """Where optimizer state is kept between updates."""

    device: Device = honoured(
        "none",
        '"cpu": host memory, streamed through the device at the update. "nvme": files.',
        auto="offload_optimizer_device",
    )
    nvme_path: Text | None = honoured(
        None, 'Folder for the files of "nvme".', auto="offload_optimizer_nvme_path", min_length=1
    )
    buffer_count: Int = honoured(
        4,
        'Buffers in the ring between file and device; of "cpu", pieces on the device at a time (left out: 3).',
        gt=0,
    )
    pin_memory: Bool = honoured(
        True, "Page-locked host memory; false is refused where a program must use it."
    )
    pipeline_read: Bool = honoured(False, "Read the next piece while one is updated.")
    pipeline_write: Bool = honoured(False, "Write the last piece while one is updated.")
    verify: Bool = honoured(
        True,
        'zeroj\'s own. Checksums of what is written to "nvme", checked at each read; false: sizes alone.',
    )
    fast_init: Bool = not_needed(False, "state is born in its place, piece by piece")
    ratio: Float = honoured(
        1.0,
        "Share of the state's bytes that is offloaded; DeepSpeed counts whole sub-groups instead.",
        ge=0,
        le=1,
    )
    super_offload: Bool = refused(
        False,
        "it updates speculatively on the host and rolls back",
        'use "device": "cpu" alone: the update is exact and runs on the device',
    )
    cpuadam_cores_perc: Float = not_needed(
        0.8, "the update runs on the device, not on host cores", ge=0, le=1
    )


class OffloadParam(Section):
    """Where params are kept between uses."""

    device: Device = honoured("none", '"cpu": host memory. "nvme": files.', auto="offload_param_device")
    nvme_path: Text | None = honoured(
        None, 'Folder for the files of "nvme".', auto="offload_param_nvme_path", min_length=1
    )
    buffer_count: Int = honoured(5, 'Host buffers for "nvme" params that are read ahead.', gt=0)
    buffer_size: Int = honoured(
        10**8,
        'Elements of a buffer for "nvme" params; left out, those of the largest piece.',
        gt=0,
    )
    max_in_cpu: Int = honoured(
        10**9, 'Elements of "nvme" params, of each host, that stay in its memory.', ge=0
    )
    pin_memory: Bool = honoured(
        True, "Page-locked host memory; false is refused where a program must use it."
    )


class Aio(Section):
    """How files are read and written."""

    block_size: Int = honoured(
        1048576, "Bytes of one request; shards smaller than this stay in memory.", gt=0
    )
    queue_depth: Int = honoured(8, "Requests in flight.", gt=0)
    intra_op_parallelism: Int = honoured(1, "Threads that share one request.", gt=0)
    single_submit: Bool = not_needed(False, "each request is one call to the operating system")
    overlap_events: Bool = not_needed(True, "each request is one call to the operating system")
    use_gds: Bool = refused(
        False,
        "there is no path from file to device memory that JAX can see",
        "pin_memory gives pinned host buffers",
    )
