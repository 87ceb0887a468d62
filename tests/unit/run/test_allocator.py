"""The allocation hook serves what was planned, and nothing it says can make a result wrong."""

import gc
import threading
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from lowtide.run import allocator
from lowtide.run.allocator import Hook, HookUnavailable, Request, compile_hook, load_hook

KIB = 1024


@pytest.fixture(scope="module")
def hook() -> Hook:
    loaded = load_hook()
    assert loaded is not None
    return loaded


def _slots(*tensors: torch.Tensor) -> list[tuple[int, int]]:
    return [(t.data_ptr(), t.untyped_storage().nbytes()) for t in tensors]


def test_record_lists_requests_and_releases(hook: Hook) -> None:
    x = torch.randn(64, 64)
    result, events, foreign = hook.record(lambda: F.layer_norm(x, (64,)))
    sizes = [event.nbytes for event in events]
    assert sizes[:3] == [64 * 64 * 4, 64 * 4, 64 * 4]  # the result, mean, rstd
    assert sizes[3:] == [None, None]
    assert events[0].address == result.data_ptr()
    assert foreign == 0


def test_record_survives_an_exception(hook: Hook) -> None:
    with pytest.raises(ZeroDivisionError):
        hook.record(lambda: 1 / 0)
    _, events, _ = hook.record(lambda: torch.empty(8))
    assert [event.nbytes for event in events] == [32]


def test_operator_without_out_variant_writes_into_the_arena(hook: Hook) -> None:
    x, weight = torch.randn(2, 8, 16, 16), torch.randn(8, 8, 3, 3)
    expected = F.conv2d(x, weight, padding=1)
    nbytes = expected.untyped_storage().nbytes()
    _, events, _ = hook.record(lambda: F.conv2d(x, weight, padding=1))
    requests, offset = [], 0
    for event in events:
        if event.nbytes is not None:
            requests.append(Request(event.nbytes, offset, temporary=event.address != expected.data_ptr()))
            offset += -(-event.nbytes // 64) * 64
    arena = hook.new_arena(offset)
    table = hook.new_table([requests])
    token = table.enter(_slots(arena))
    try:
        table.step.value = 1
        result = F.conv2d(x, weight, padding=1)
    finally:
        table.leave(token)
    assert arena.data_ptr() <= result.data_ptr() < arena.data_ptr() + offset
    assert result.untyped_storage().nbytes() == nbytes
    assert torch.equal(result, expected)
    assert (table.served, table.missed) == (len(requests), 0)


def test_first_difference_ends_serving_for_the_step(hook: Hook) -> None:
    arena = hook.new_arena(4 * KIB)
    table = hook.new_table([[Request(64, 0), Request(128, 64)], [Request(64, 192)]])
    token = table.enter(_slots(arena))
    try:
        table.step.value = 1
        other, planned = torch.empty(8), torch.empty(16)  # 32 bytes were not expected: neither is served
        table.step.value = 2
        served = torch.empty(16)
    finally:
        table.leave(token)
    low = arena.data_ptr()
    assert not low <= other.data_ptr() < low + 4 * KIB
    assert not low <= planned.data_ptr() < low + 4 * KIB
    assert served.data_ptr() == low + 192
    assert table.misses() == (0, 2, 0)
    assert table.missed_bytes == 32 + 64


def test_shared_address_waits_for_the_release(hook: Hook) -> None:
    arena = hook.new_arena(KIB)
    plan = [Request(64, 0), Request(64, 0)]
    table = hook.new_table([plan, plan])
    token = table.enter(_slots(arena))
    try:
        table.step.value = 1
        first = torch.empty(16)
        address = first.data_ptr()
        del first
        second = torch.empty(16)
        assert second.data_ptr() == address
        table.step.value = 2
        del second
        kept, late = torch.empty(16), torch.empty(16)
        assert kept.data_ptr() == address != late.data_ptr()
    finally:
        table.leave(token)


def test_zero_bytes_take_no_request(hook: Hook) -> None:
    arena = hook.new_arena(KIB)
    table = hook.new_table([[Request(64, 128)]])
    token = table.enter(_slots(arena))
    try:
        table.step.value = 1
        nothing, served = torch.empty(0), torch.empty(16)
    finally:
        table.leave(token)
    assert nothing.data_ptr() == 0
    assert served.data_ptr() == arena.data_ptr() + 128
    assert table.missed == 0


def test_arena_is_aligned_and_outlives_its_owner(hook: Hook) -> None:
    before = hook.arena_count()
    arena = hook.new_arena(64 * KIB)
    assert arena.data_ptr() % 64 == 0
    table = hook.new_table([[Request(64, 0)]])
    token = table.enter(_slots(arena))
    table.step.value = 1
    survivor = torch.full((16,), 7.0)
    table.leave(token)
    assert survivor.data_ptr() == arena.data_ptr()
    del arena, table
    gc.collect()
    assert hook.arena_count() == before + 1
    noise = [torch.zeros(16 * KIB) for _ in range(4)]
    assert survivor.tolist() == [7.0] * 16 and len(noise) == 4
    del survivor
    assert hook.arena_count() == before


def test_output_slot_belongs_to_its_tensor(hook: Hook) -> None:
    arena, output = hook.new_arena(KIB), torch.zeros(16)
    table = hook.new_table([[Request(64, 0, slot=1)]], slots=2)
    token = table.enter(_slots(arena, output))
    table.step.value = 1
    served = torch.ones(16)
    table.leave(token)
    assert served.data_ptr() == output.data_ptr()
    del served  # released after the run: must not free the output's memory
    assert output.tolist() == [1.0] * 16


def test_kept_temporary_is_reported(hook: Hook) -> None:
    arena = hook.new_arena(KIB)
    table = hook.new_table([[Request(64, 0, temporary=True)], [Request(64, 64, temporary=True)]])
    token = table.enter(_slots(arena))
    table.step.value = 1
    torch.empty(16)
    table.step.value = 2
    kept = torch.empty(16)
    table.leave(token)
    assert table.kept_step == 2
    assert kept.numel() == 16


def test_two_tables_and_threads_do_not_meet(hook: Hook) -> None:
    arenas = [hook.new_arena(KIB) for _ in range(2)]
    tables = [hook.new_table([[Request(64, 64 * k)]]) for k in (1, 2)]
    both = threading.Barrier(2)
    found: list[int] = [0, 0]

    def run(k: int) -> None:
        token = tables[k].enter(_slots(arenas[k]))
        both.wait()
        tables[k].step.value = 1
        found[k] = torch.empty(16).data_ptr()
        both.wait()
        tables[k].leave(token)

    threads = [threading.Thread(target=run, args=(k,)) for k in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [arenas[0].data_ptr() + 64, arenas[1].data_ptr() + 128]


def test_nested_table_gives_back_the_outer_one(hook: Hook) -> None:
    outer_arena, inner_arena = hook.new_arena(KIB), hook.new_arena(KIB)
    outer = hook.new_table([[Request(64, 0)], [Request(64, 64)]])
    inner = hook.new_table([[Request(64, 0)]])
    token = outer.enter(_slots(outer_arena))
    outer.step.value = 1
    first = torch.empty(16)
    outer.step.value = 0
    again = inner.enter(_slots(inner_arena))
    inner.step.value = 1
    nested = torch.empty(16)
    inner.leave(again)
    outer.step.value = 2
    second = torch.empty(16)
    outer.leave(token)
    assert first.data_ptr() == outer_arena.data_ptr()
    assert nested.data_ptr() == inner_arena.data_ptr()
    assert second.data_ptr() == outer_arena.data_ptr() + 64


def test_resizing_a_served_tensor_moves_it_out(hook: Hook) -> None:
    arena = hook.new_arena(KIB)
    table = hook.new_table([[Request(64, 0)]])
    token = table.enter(_slots(arena))
    table.step.value = 1
    tensor = torch.full((16,), 3.0)
    table.leave(token)
    tensor.resize_(1024)
    assert tensor.data_ptr() != arena.data_ptr()
    assert tensor[:16].tolist() == [3.0] * 16


def test_without_a_compiler_there_is_one_clear_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(HookUnavailable, match="no C\\+\\+ compiler"):
        compile_hook(tmp_path)
    monkeypatch.setattr(allocator, "_load_once", lambda: (None, "no C++ compiler"))
    with pytest.warns(RuntimeWarning, match="without its allocation hook \\(no C\\+\\+ compiler\\)"):
        assert load_hook() is None
    assert load_hook() is None  # the second time it is silent


def test_broken_source_names_the_compilers_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocator, "_flags", lambda: ["-O2", "-std=c++17", "-shared", "-fPIC", "-I/nowhere"])
    with pytest.raises(HookUnavailable, match=r"Allocator\.h"):
        compile_hook(tmp_path)
    assert not list(tmp_path.glob("*.so"))
