"""The two sources of allocator events tell the same story."""

import torch
import torch.nn.functional as F

from lowtide.run.allocator import Event, load_hook
from lowtide.run.events import Log, blocks_of, peak_bytes, record_with_hook, record_with_profiler


def test_blocks_number_events_without_older_releases() -> None:
    log = Log((Event(9, None), Event(1, 100), Event(2, 50), Event(1, None), Event(1, 10)))
    blocks = [(b.address, b.nbytes, b.start, b.stop) for b in blocks_of(log)]
    assert blocks == [(1, 100, 0, 2), (2, 50, 1, None), (1, 10, 3, None)]
    assert peak_bytes(log) == 150


def test_peak_counts_older_blocks_that_are_given_back() -> None:
    log = Log((Event(9, None), Event(1, 100)), older=(Event(9, 80),))
    assert peak_bytes(log) == 20
    assert peak_bytes(Log((Event(9, None),), older=(Event(9, 80),))) == 0


def test_hook_and_profiler_agree_on_a_training_step() -> None:
    hook = load_hook()
    assert hook is not None
    x, weight = torch.randn(2, 4, 16, 16), torch.randn(4, 4, 3, 3, requires_grad=True)

    def step() -> None:
        F.mse_loss(F.conv2d(x, weight, padding=1).relu(), x).backward()
        weight.grad = None

    step()
    _, by_hook = record_with_hook(hook, step)
    _, by_profiler = record_with_profiler(step)
    assert peak_bytes(by_hook) == peak_bytes(by_profiler) > x.numel() * 4
    sizes = [[b.nbytes for b in blocks_of(log)] for log in (by_hook, by_profiler)]
    assert sizes[0] == sizes[1]


def test_profiler_knows_what_the_step_before_left() -> None:
    kept: list[torch.Tensor] = []

    def replace() -> None:
        kept.clear()
        kept.append(torch.empty(1000))

    replace()
    _, log = record_with_profiler(replace, before=replace)
    assert [event.nbytes for event in log.older] == [4000]
    assert peak_bytes(log) == 0
