"""Leaves Python as it was: generators, attributes, counters, whatever a recording touched.

A step that changes Python objects is refused with the name of the first one, after it has been put back.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from lowtide.capture.fingerprint import Fingerprint
from lowtide.errors import CaptureError
from lowtide.workload import Workload

__all__ = ["seed", "undisturbed"]


@contextmanager
def undisturbed(workload: Workload) -> Iterator[Fingerprint]:
    """Inside, the step may be run, under any `seed`; yields what was found before.

    Raises CaptureError if the step changed Python objects that it can reach.
    """
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    fingerprint = Fingerprint({"model": workload.model, "loss": workload.loss})
    try:
        yield fingerprint
    except BaseException:
        fingerprint.settle()
        raise
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
    changes = fingerprint.settle()
    if changes:
        more = f" and {len(changes) - 1} more" if len(changes) > 1 else ""
        raise CaptureError(
            f"the step changes Python objects: {changes[0]}{more}",
            remedy="count and cache outside of the step; keep tensors that change as buffers",
        )


def seed(number: int) -> None:
    """Seed all generators."""
    random.seed(number)
    np.random.seed(number)
    torch.default_generator.manual_seed(number)
