"""Compiling for a cluster that is not here, and reading the program."""

from zeroj.aot.hardware import Gpu as Gpu
from zeroj.aot.report import Report as Report
from zeroj.aot.shapes import HloError as HloError
from zeroj.aot.target import Target as Target
