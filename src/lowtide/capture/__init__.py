"""From an unmodified PyTorch model to a `Program`: one graph of a training step, or of an inference."""

from lowtide.capture.door import capture
from lowtide.capture.program import Program

__all__ = ["Program", "capture"]
