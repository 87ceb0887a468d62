"""Index arithmetic: simplified forms equal the plain ones, and the known identities collapse."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from lowtide.fusion.codegen.index import Index, Quotient, Remainder, Var, flatten, unflatten


def value(index: Index, where: dict[Var, int]) -> int:
    total = index.constant
    for atom, factor in index.terms:
        if isinstance(atom, Var):
            total += factor * where[atom]
        elif isinstance(atom, Quotient):
            total += factor * (value(atom.index, where) // atom.divisor)
        else:
            assert isinstance(atom, Remainder)
            total += factor * (value(atom.index, where) % atom.divisor)
    return total


def points(*axes: Var) -> list[dict[Var, int]]:
    ranges = itertools.product(*(range(axis.size) for axis in axes))
    return [dict(zip(axes, point, strict=True)) for point in ranges]


@given(
    sizes=st.lists(st.integers(1, 4), min_size=2, max_size=3),
    factors=st.lists(st.integers(0, 12), min_size=3, max_size=3),
    constant=st.integers(0, 9),
    first=st.integers(1, 8),
    second=st.integers(1, 8),
)
def test_simplified_forms_equal_plain_arithmetic(
    sizes: list[int], factors: list[int], constant: int, first: int, second: int
) -> None:
    axes = [Var(f"v{k}", size) for k, size in enumerate(sizes)]
    index = Index.of(constant)
    for axis, factor in zip(axes, factors, strict=False):
        index = index + Index.of(axis) * factor
    for where in points(*axes):
        plain = constant + sum(f * where[a] for a, f in zip(axes, factors, strict=False))
        assert value(index // first, where) == plain // first
        assert value(index % first, where) == plain % first
        assert value((index // first) % second, where) == plain // first % second
        assert value((index % first) // second, where) == plain % first // second
        assert value((index // first) * first + index % first, where) == plain


def test_quotient_and_remainder_merge_back() -> None:
    x = Index.of(Var("x", 24))
    assert (x // 4) * 4 + x % 4 == x
    assert (x // 4) * 12 + (x % 4) * 3 == x * 3


def test_a_split_variable_has_no_division_left() -> None:
    outer, inner = Index.of(Var("a", 6)), Index.of(Var("b", 4))
    whole = outer * 4 + inner
    assert whole // 4 == outer
    assert whole % 4 == inner
    assert whole // 8 == outer // 2
    assert whole % 8 == (outer % 2) * 4 + inner


def test_reshape_of_a_permuted_tensor_is_the_smartmem_example() -> None:
    """Reshape [2, 256, 4] -> [16, 8, 4, 4], transpose -> [16, 4, 8, 4]: exact at every element."""
    axes = [Var(f"d{k}", size) for k, size in enumerate((16, 4, 8, 4))]
    a, b, c, d = (Index.of(axis) for axis in axes)
    found = unflatten(flatten((a, c, b, d), (16, 8, 4, 4)), (2, 256, 4))
    for where in points(*axes)[::37]:
        i, j, k, m = (where[axis] for axis in axes)
        flat = ((i * 8 + k) * 4 + j) * 4 + m
        assert [value(index, where) for index in found] == [flat // 1024, flat // 4 % 256, flat % 4]


def test_flatten_of_unflatten_is_the_position() -> None:
    position = Index.of(Var("p", 60))
    assert flatten(unflatten(position, (3, 4, 5)), (3, 4, 5)) == position
