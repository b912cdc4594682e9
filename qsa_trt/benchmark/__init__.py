"""`qsa-trt bench`: times the plugin on a GPU, compares two records, draws one."""

from .compare import Comparison, compare_records
from .plot import plot_record
from .record import Record, read_record
from .run import run_benchmark

__all__ = ["Comparison", "Record", "compare_records", "plot_record", "read_record", "run_benchmark"]
