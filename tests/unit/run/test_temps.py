"""Temporaries share addresses only while they cannot meet, and lie where an output is not yet."""

from lowtide.analysis.facts import OperatorFacts, Temp
from lowtide.ir.ops import Aten
from lowtide.run.temps import align, pack_temps, plan_requests

CONV = Aten("aten.convolution.default")
ADD = Aten("aten.add.Tensor")


def test_align_rounds_up() -> None:
    assert [align(n) for n in (0, 1, 64, 65)] == [0, 64, 64, 128]


def test_disjoint_lives_share_and_overlapping_lives_do_not() -> None:
    facts = OperatorFacts((), 0, (Temp(100, 0, 2), Temp(100, 1, 3), Temp(100, 3, 4)), ())
    packing = pack_temps(ADD, facts)
    assert packing.places == ((-1, 0), (-1, 128), (-1, 0))
    assert packing.nbytes == 256


def test_output_hosts_what_is_released_before_it_is_requested() -> None:
    # temp 0 taken (0) and released (1), then the output (2), then temp 1 (3, 4)
    facts = OperatorFacts((512,), 0, (Temp(512, 0, 1), Temp(64, 3, 4)), ((512, -1), (512, 0), (64, -2)))
    packing = pack_temps(CONV, facts)
    assert packing.places == ((0, 0), (-1, 0))
    assert packing.nbytes == 64


def test_output_does_not_host_what_is_still_held() -> None:
    facts = OperatorFacts((512,), 0, (Temp(512, 0, 2),), ((512, -1), (512, 0)))
    assert pack_temps(CONV, facts).places == ((-1, 0),)


def test_output_that_may_lie_over_an_input_hosts_nothing() -> None:
    facts = OperatorFacts((512,), 0, (Temp(8, 0, 1),), ((8, -1), (512, 0)))
    assert pack_temps(ADD, facts).places == ((-1, 0),)


def test_nothing_is_served_where_the_workspace_has_no_room() -> None:
    """Facts of a machine without the hook count no temporaries."""
    facts = OperatorFacts((512,), 512, (Temp(64, 1, 2),), ((512, 0), (64, -1)))
    assert plan_requests(CONV, facts, workspace=4096, outputs=[(0, 128)]) == ()


def test_requests_lie_in_workspace_and_slots() -> None:
    facts = OperatorFacts((512,), 576, (Temp(512, 0, 1), Temp(64, 3, 4)), ((512, -1), (512, 0), (64, -2)))
    first, output, last = plan_requests(CONV, facts, workspace=4096, outputs=[(2, 128)])
    assert (first.nbytes, first.slot, first.offset, first.temporary) == (512, 2, 128, True)
    assert (output.nbytes, output.slot, output.offset, output.temporary) == (512, 2, 128, False)
    assert (last.nbytes, last.slot, last.offset, last.temporary) == (64, 0, 4096, True)
