"""Temporaries and outputs have their moments: what is not there at the same one may share addresses."""

from lowtide.analysis.facts import OperatorFacts, Temp
from lowtide.ir.ops import Aten
from lowtide.run.temps import HELD, Group, align, held_bytes, inside_of, plan_requests

CONV = Aten("aten.convolution.default")
ADD = Aten("aten.add.Tensor")


def test_align_rounds_up() -> None:
    assert [align(n) for n in (0, 1, 64, 65)] == [0, 64, 64, 128]


def test_what_is_held_is_the_most_at_one_moment() -> None:
    """A reordered input is gone before the result is asked for: eager never has both."""
    # temp 0 taken (0) and released (1), then the output (2), then temp 1 (3, 4)
    temps, sequence = (Temp(1024, 0, 1), Temp(128, 3, 4)), ((1024, -1), (512, 0), (128, -2))
    facts = OperatorFacts((512,), 1024, temps, sequence)
    inside = inside_of(CONV, facts)
    assert inside.groups == (Group((0,), (0,), 1024, 0, 1), Group((1,), (0,), 128, 3, 4))
    assert (inside.requested, inside.moments) == ({0: 2}, 5)
    assert held_bytes(CONV, facts) == 1024
    still = OperatorFacts((512,), 1536, (Temp(1024, 0, 2),), sequence[:2])
    assert held_bytes(CONV, still) == 1024 + 512


def test_an_output_that_may_lie_over_an_input_is_there_from_the_first_moment() -> None:
    facts = OperatorFacts((512,), 1536, (Temp(1024, 0, 1),), ((1024, -1), (512, 0)))
    assert inside_of(ADD, facts).requested == {}
    assert held_bytes(ADD, facts) == 1536
    assert held_bytes(CONV, facts) == 1024


def test_what_is_copied_is_there_from_the_last_moment() -> None:
    facts = OperatorFacts((512,), 0, (Temp(2048, 0, 2), Temp(512, 1, HELD)), ((2048, -1), (512, -2)))
    assert held_bytes(CONV, facts) == 2048 + 512
    facts = OperatorFacts((512,), 0, (Temp(768, 0, 1), Temp(512, 2, HELD)), ((768, -1), (512, -2)))
    assert held_bytes(CONV, facts) == 2 * 512


def test_temporaries_of_a_line_are_packed_together() -> None:
    temps = (Temp(8, 0, 2), Temp(4, 1, 3), Temp(8, 3, 4))
    facts = OperatorFacts((512,), 1024, temps, ((8, -1), (4, -2), (8, -3)))
    (group,) = inside_of(ADD, facts).groups
    assert dict(zip(group.temps, group.offsets, strict=True)) == {0: 0, 1: 8, 2: 0}
    assert (group.nbytes, group.start, group.stop) == (12, 0, 5)


def test_nothing_is_served_where_facts_leave_no_room() -> None:
    """Facts of a machine without the hook count no temporaries."""
    facts = OperatorFacts((512,), 512, (Temp(64, 1, 2),), ((512, 0), (64, -1)))
    assert inside_of(CONV, facts).groups == ()
    assert plan_requests(facts, [], outputs=[(0, 128)]) == ()


def test_requests_lie_in_their_slots() -> None:
    facts = OperatorFacts((512,), 576, (Temp(512, 0, 1), Temp(64, 3, 4)), ((512, -1), (512, 0), (64, -2)))
    first, output, last = plan_requests(facts, [(2, 128), (0, 4096)], outputs=[(2, 128)])
    assert (first.nbytes, first.slot, first.offset, first.temporary) == (512, 2, 128, True)
    assert (output.nbytes, output.slot, output.offset, output.temporary) == (512, 2, 128, False)
    assert (last.nbytes, last.slot, last.offset, last.temporary) == (64, 0, 4096, True)
