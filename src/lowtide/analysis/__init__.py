"""What can be said about a graph without running it: lifetimes, live bytes, content keys."""

from lowtide.analysis.facts import Facts, OperatorFacts, Temp, assumed_facts, workspace_bytes
from lowtide.analysis.lifetime import INPLACE, Buffer, lifetimes
from lowtide.analysis.timeline import Timeline, timeline

__all__ = [
    "INPLACE",
    "Buffer",
    "Facts",
    "OperatorFacts",
    "Temp",
    "Timeline",
    "assumed_facts",
    "lifetimes",
    "timeline",
    "workspace_bytes",
]
