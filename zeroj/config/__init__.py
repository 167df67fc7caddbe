"""Reading and checking ds_config.json."""

from zeroj.config.batch import Batch as Batch
from zeroj.config.batch import BatchSizes as BatchSizes
from zeroj.config.config import Config as Config
from zeroj.config.precision import LossScale as LossScale
from zeroj.config.zero import Zero as Zero
