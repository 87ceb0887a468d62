"""Every operator in INPLACE, really run with its result at the address of each input.

The allocation hook answers the request for the result with the address of the input, which is how the
arena executor reuses a dying buffer.  Where an ``out=`` form exists it is also called with a tensor at
that address.  All overloads of a name are tried, for several element types, layouts and sizes (the
large one is split among threads).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from lowtide.analysis.inplace import INPLACE, SCATTERS
from lowtide.ir.aten import call as call_plainly
from lowtide.ir.ops import Aten, Ref
from lowtide.run.allocator import Hook, Request, load_hook
from lowtide.run.calls import out_variant, prepare_out_call

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool)
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "small": lambda x: x,
    "large": lambda x: x.repeat(2, 5, 7, 5),
    "channels-last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "permuted": lambda x: x.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0),
    "vector": lambda x: x.flatten(),
}
NUMBERS = {"min": -0.5, "max": 0.75, "weight": 0.3, "decimals": 1, "half_to_float": False}
CHOICES: dict[str, tuple[Any, ...]] = {
    "rounding_mode": (None, "floor", "trunc"),
    "approximate": ("none", "tanh"),
    "is_result": (False, True),
    "dim": (0, 1, -1),
}


@pytest.fixture(scope="module")
def hook() -> Hook:
    found = load_hook()
    assert found is not None
    return found


def overloads(name: str) -> Iterator[Any]:
    """The functional overloads of an ATen name that return one tensor."""
    packet = getattr(torch.ops.aten, name)
    for word in packet.overloads():
        found = getattr(packet, word)
        schema = found._schema
        plain = all(str(a.type) not in ("complex", "Generator") for a in schema.arguments)
        if not schema.is_mutable and [str(r.type) for r in schema.returns] == ["Tensor"] and plain:
            yield found


def make_tensor(dtype: torch.dtype, layout: str, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    base = torch.rand(2, 3, 5, 7, generator=generator) * 3 - 1
    x = LAYOUTS[layout](base)
    return (x > 0.3) if dtype == torch.bool else x.to(dtype)


def arguments(found: Any, dtype: torch.dtype, layout: str) -> Iterator[tuple[list[Any], dict[str, Any]]]:
    """Calls of an overload: positional and keyword-only arguments, for each choice of an option."""
    schema = found._schema.arguments
    options = [a.name for a in schema if a.name in CHOICES]
    for choice in CHOICES[options[0]] if options else (None,):
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for position, argument in enumerate(schema):
            value = make_argument(argument, dtype, layout, position)
            value = choice if argument.name in options[:1] else value
            if argument.kwarg_only:
                kwargs[argument.name] = value
            else:
                args.append(value)
        yield args, kwargs


def make_argument(argument: Any, dtype: torch.dtype, layout: str, position: int) -> Any:
    kind = str(argument.type)
    if "Tensor" in kind:
        is_mask = argument.name in ("condition", "mask")
        x = make_tensor(torch.bool if is_mask else dtype, layout, position)
        return x.flatten()[0].clone() if argument.name == "value" else x
    if argument.name == "input_dtype":
        return dtype
    if argument.name in NUMBERS:
        return NUMBERS[argument.name]
    if argument.has_default_value():
        return argument.default_value
    number = 1.25 if dtype.is_floating_point else torch.tensor(1, dtype=dtype).item()
    return {"number": number, "float": 0.75, "bool": True, "int": 2}.get(kind.removeprefix("Optional["), 2)


def window_on(x: Tensor) -> Tensor:
    """A tensor of its own storage at the address, with the layout, of `x`."""
    block = (ctypes.c_char * x.untyped_storage().nbytes()).from_address(x.data_ptr())
    return torch.frombuffer(block, dtype=x.dtype).as_strided(x.shape, x.stride())


def donors(found: Any, args: list[Any], expected: Tensor) -> Iterator[int]:
    """Arguments that the table allows and whose layout and type are the result's."""
    positions = INPLACE[found._schema.name.removeprefix("aten::")]
    for position, x in enumerate(args):
        allowed = positions is None or position in positions
        if (
            allowed
            and isinstance(x, Tensor)
            and (x.dtype, x.shape, x.stride())
            == (
                expected.dtype,
                expected.shape,
                expected.stride(),
            )
        ):
            yield position


def check_served(hook: Hook, found: Any, args: list[Any], kwargs: dict[str, Any], expected: Tensor) -> int:
    """Run with the result's request answered by each donor's address; how many donors there were."""
    positions = tuple(donors(found, args, expected))
    for position in positions:
        donor = args[position]
        requests, total = plan(hook, lambda: found(*args, **kwargs), donor)
        arena = hook.new_arena(total)
        block = arena[: donor.untyped_storage().nbytes()].view(donor.dtype)
        copy = block.as_strided(donor.shape, donor.stride()).copy_(donor)
        changed = [*args[:position], copy, *args[position + 1 :]]
        table = hook.new_table([requests])
        token = table.enter([(arena.data_ptr(), total)])
        try:
            table.step.value = 1
            got = found(*changed, **kwargs)
        finally:
            table.leave(token)
        assert got.data_ptr() == copy.data_ptr(), f"{found}: the result was not served"
        assert same_bits(got, expected), f"{found} over argument {position}: {donor.dtype} {donor.stride()}"
    return len(positions)


def plan(hook: Hook, call: Callable[[], Tensor], donor: Tensor) -> tuple[list[Request], int]:
    """The result at offset 0, where the donor will be, temporaries after it; and the bytes of all."""
    result, events, _ = hook.record(call)
    asked = [event for event in events if event.nbytes is not None]
    last = max(k for k, event in enumerate(asked) if event.address == result.data_ptr())
    offset = -(-donor.untyped_storage().nbytes() // 64) * 64
    requests = []
    for k, event in enumerate(asked):
        nbytes = event.nbytes or 0
        requests.append(Request(nbytes, 0 if k == last else offset, temporary=k != last))
        offset += 0 if k == last else -(-nbytes // 64) * 64
    return requests, offset


def check_out(found: Any, args: list[Any], kwargs: dict[str, Any], expected: Tensor) -> None:
    """Call the ``out=`` form with a tensor over each donor."""
    for position in donors(found, args, expected):
        for out_form in out_forms(found):
            copy = args[position].clone()
            assert copy.stride() == args[position].stride()
            changed = [*args[:position], copy, *args[position + 1 :]]
            got = out_form(*changed, **kwargs, out=window_on(copy))
            assert got.data_ptr() == copy.data_ptr()
            assert same_bits(copy, expected), f"{out_form} over argument {position}: {expected.dtype}"


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors agree in every bit, those of NaNs included."""
    if not left.is_floating_point():
        return torch.equal(left, right)
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[left.dtype.itemsize]
    return torch.equal(left.view(bits), right.view(bits))


def out_forms(found: Any) -> Iterator[Any]:
    """Overloads that take the same arguments and one tensor to write into, named ``out``."""
    packet = found.overloadpacket
    ours = [str(a.type) for a in found._schema.arguments]
    for word in packet.overloads():
        other = getattr(packet, word)
        theirs = other._schema.arguments
        writes = [a for a in theirs if a.is_out]
        if [a.name for a in writes] == ["out"] and [str(a.type) for a in theirs if not a.is_out] == ours:
            yield other


@pytest.mark.parametrize("name", sorted(INPLACE.keys() - set(SCATTERS)))
def test_result_over_a_dying_input(name: str, hook: Hook) -> None:
    for found in overloads(name):
        tried = sum(check_overload(hook, found, dtype, layout) for dtype in DTYPES for layout in LAYOUTS)
        assert tried, f"{found} could not be run over an input; take aten.{name} out of INPLACE"


def check_overload(hook: Hook, found: Any, dtype: torch.dtype, layout: str) -> int:
    """Every call of an overload for one element type and layout; how many donors were tried."""
    tried = 0
    for args, kwargs in arguments(found, dtype, layout):
        try:
            expected = found(*args, **kwargs)
        except (RuntimeError, TypeError, IndexError):
            continue  # the operator has no kernel for this element type or these options
        tried += check_served(hook, found, args, kwargs, expected)
        check_out(found, args, kwargs, expected)
    return tried


SCATTERED = {
    "as_strided_scatter": ((2, 3), (5, 1), 4),
    "diagonal_scatter": (1, 0, 1),
    "select_scatter": (1, -1),
    "slice_scatter": (0, 0, 9, 1),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", SCATTERS)
def test_scatter_over_its_whole(name: str, layout: str) -> None:
    """The executor's own out= form, which is the only one that it uses."""
    op = Aten(f"aten.{name}.default", (Ref(0), Ref(1), *SCATTERED[name]))
    variant = out_variant(op.overload)
    assert variant is not None
    for dtype in DTYPES:
        whole = make_tensor(dtype, layout, 0)
        if layout == "vector":
            whole = whole.view(-1, 7)
        view = Aten(f"aten.{VIEWS[name]}", (Ref(0), *SCATTERED[name]))
        old = call_plainly(view, (whole,))
        part = ~old if dtype == torch.bool else 1 - old
        expected = call_plainly(op, (whole, part))
        copy = whole.clone()
        call = prepare_out_call(op, variant)
        call.bind(0, copy)
        call.bind(1, part)
        call.kwargs["out"] = window_on(copy)
        call()
        assert same_bits(copy, expected) and not same_bits(copy, whole)


VIEWS = {
    "as_strided_scatter": "as_strided.default",
    "diagonal_scatter": "diagonal.default",
    "select_scatter": "select.int",
    "slice_scatter": "slice.Tensor",
}
