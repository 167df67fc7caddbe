"""The errors that zeroj raises for a user's mistakes and for faults of the machine."""


class ZerojError(Exception):
    """Base of every error that zeroj raises on purpose."""


class ConfigError(ZerojError, ValueError):
    """A configuration that is unknown, contradictory or impossible. Lists every fault at once."""


class PlanError(ZerojError, ValueError):
    """Params, optimizer, mesh, batch or loss that do not fit together."""


class SpillError(ZerojError):
    """Reading or writing state on disk failed, or what was read is not what was written."""


class CheckpointError(ZerojError):
    """A checkpoint that is missing, damaged, or does not fit the plan."""
