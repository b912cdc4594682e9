"""`qsa-trt bench`: times the plugin on a GPU, compares two records, draws one."""

from .compare import Comparison, compare
from .plot import plot
from .record import Record, read_record
from .run import run_benchmark

__all__ = ["Comparison", "Record", "compare", "plot", "read_record", "run_benchmark"]
