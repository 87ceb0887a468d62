"""The bundled models, and the reading of what a user types."""

from lowtide.workloads.catalog import BUNDLED, TINY, Option, options_of, summary_of
from lowtide.workloads.parse import load_workload

__all__ = ["BUNDLED", "TINY", "Option", "load_workload", "options_of", "summary_of"]
