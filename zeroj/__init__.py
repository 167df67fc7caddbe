"""zeroj: the ZeRO family for JAX. Use as ``import zeroj as zj``."""

from zeroj import aot as aot
from zeroj.errors import CheckpointError as CheckpointError
from zeroj.errors import ConfigError as ConfigError
from zeroj.errors import PlanError as PlanError
from zeroj.errors import SpillError as SpillError
from zeroj.errors import ZerojError as ZerojError
