"""The three batch sizes, any two of which give the third once the mesh is known."""

from __future__ import annotations

import dataclasses

from zeroj.errors import ConfigError

_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


@dataclasses.dataclass(frozen=True)
class BatchSizes:
    """The batch sizes on a given mesh: train == micro * accumulation * world.

    Args:
        train: examples of one update, over all devices.
        micro: examples of one device in one forward and backward pass.
        accumulation: micro-batches of one update.
    """

    train: int
    micro: int
    accumulation: int


@dataclasses.dataclass(frozen=True)
class Batch:
    """The batch sizes as the file gives them; None where it leaves one out.

    Nothing is worked out before the mesh is known, so that a config read before `jax.distributed.initialize`,
    or used on another mesh, never counts the wrong devices.
    """

    train: int | None = None
    micro: int | None = None
    accumulation: int | None = None

    def resolve(self, world: int, axes: str) -> BatchSizes:
        """The batch sizes for `world` devices.

        Args:
            world: devices that each take their own slice of the batch: the product of the zero axes.
            axes: which mesh axes were counted, for messages, as in "node=2 x local=4".

        Returns:
            All three sizes. Two given: the third. Only train: no accumulation. Only micro: no accumulation.

        Raises:
            ConfigError: neither train nor micro is given, or the sizes do not fit together.

        Example:
            >>> Batch(train=32, micro=2).resolve(8, "data=8")
            BatchSizes(train=32, micro=2, accumulation=2)
        """
        counted = f"{world} device{'s' if world != 1 else ''} (mesh axes counted: {axes})"
        self._check_world(world, counted)
        train, micro, accumulation = self.train, self.micro, self.accumulation
        if train is None:
            assert micro is not None
            accumulation = accumulation or 1
            train = micro * accumulation * world
        elif micro is None:
            accumulation = accumulation or 1
            micro = _divide(train, accumulation * world, f"{_KEYS[2]}={accumulation}", _KEYS[1], counted)
        elif accumulation is None:
            accumulation = _divide(train, micro * world, f"{_KEYS[1]}={micro}", _KEYS[2], counted)
        product = micro * accumulation * world
        if train != product:
            raise ConfigError(
                f"batch sizes: {_KEYS[0]}={train}, but {_KEYS[1]}={micro} x {_KEYS[2]}={accumulation} x "
                f"{world} devices = {product}. Counted {counted}. Leave one of the three out, and zeroj "
                "works it out."
            )
        return BatchSizes(train, micro, accumulation)

    def _check_world(self, world: int, counted: str) -> None:
        if self.train is None and self.micro is None:
            raise ConfigError(
                f"batch sizes: set {_KEYS[0]} or {_KEYS[1]}; the config has {self.given()}. "
                f"Counted {counted}."
            )
        if self.train is not None and self.train < world:
            raise ConfigError(
                f"batch sizes: {_KEYS[0]}={self.train} is less than one example for each of {counted}. A "
                f"global batch must be at least {world} there; to put less than one example on a device, use "
                "a mesh with a further axis for the model, which is not counted."
            )

    def given(self) -> str:
        """The sizes that the config gives, as "key=value, ..."."""
        values = (self.train, self.micro, self.accumulation)
        return ", ".join(f"{k}={v}" for k, v in zip(_KEYS, values) if v is not None) or "none of the three"


def _divide(train: int, by: int, divisor: str, wanted: str, counted: str) -> int:
    if train % by:
        raise ConfigError(
            f"batch sizes: {_KEYS[0]}={train} and {divisor} on {counted} give {wanted} = {train}/{by}, "
            f"which is not a whole number. Choose {_KEYS[0]} as a multiple of {by}."
        )
    return train // by
