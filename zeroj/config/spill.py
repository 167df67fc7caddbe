"""How state is spilled to files: what an "offload_" section and "aio" say together, as one piece of data."""

from __future__ import annotations

from dataclasses import dataclass, replace

from zeroj.config.offload import Aio, OffloadOptimizer, OffloadParam

#: Shards smaller than this stay in memory where no "aio" section says otherwise.
SMALLEST = 1 << 20


@dataclass(frozen=True)
class SpillSettings:
    """Where and how files are written.

    Attributes:
        path: the folder of the files, shared with other runs; each run makes a subfolder of its own.
        direct: whether the direct engine is used (there is an "aio" section), else the Orbax one.
        block_size: bytes of one request of the direct engine.
        queue_depth: requests in flight of each of ``threads``.
        threads: threads that share one piece ("intra_op_parallelism").
        smallest: bytes; a shard with fewer stays in memory.
        verify: whether checksums are kept and checked, beside sizes.
        buffer_count: buffers between file and device, each of the largest piece's size.
        pipeline_read: whether the next leaves are read while one is updated.
        pipeline_write: whether the last leaves are written while one is updated.
        held: elements that stay in host memory all the same ("max_in_cpu").
        buffer_size: elements of one buffer for params, or None: those of the largest piece.
    """

    path: str
    direct: bool = False
    block_size: int = 1 << 20
    queue_depth: int = 8
    threads: int = 1
    smallest: int = SMALLEST
    verify: bool = True
    buffer_count: int = 4
    pipeline_read: bool = False
    pipeline_write: bool = False
    held: int = 0
    buffer_size: int | None = None


def spill_settings(section: OffloadOptimizer | OffloadParam | None, aio: Aio | None) -> SpillSettings | None:
    """What the sections say; None where nothing is spilled.

    Params are always read ahead, in the order of the last step, and their checksums kept.

    Args:
        section: "offload_optimizer" or "offload_param".
        aio: the section "aio", or None where there is none: then the Orbax engine is used.
    """
    if section is None or section.device != "nvme" or not section.nvme_path:
        return None
    given = aio or Aio()
    settings = SpillSettings(
        path=section.nvme_path,
        direct=aio is not None,
        block_size=given.block_size,
        queue_depth=given.queue_depth,
        threads=given.intra_op_parallelism,
        smallest=given.block_size if aio is not None else SMALLEST,
        buffer_count=section.buffer_count,
    )
    if isinstance(section, OffloadParam):
        size = section.buffer_size if "buffer_size" in section.model_fields_set else None
        return replace(
            settings, pipeline_read=True, pipeline_write=True, held=section.max_in_cpu, buffer_size=size
        )
    return replace(
        settings,
        verify=section.verify,
        pipeline_read=section.pipeline_read,
        pipeline_write=section.pipeline_write,
    )
