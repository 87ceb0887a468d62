"""Placement: from lifetimes to offsets in one arena."""

from lowtide.place.exact import ExactPlacement, place, place_exact, warm_up
from lowtide.place.fit import Pruning
from lowtide.place.greedy import place_greedy
from lowtide.place.judge import check_placement
from lowtide.place.problem import Block, Placement, PlacementProblem, lower_bound

__all__ = [
    "Block",
    "ExactPlacement",
    "Placement",
    "PlacementProblem",
    "Pruning",
    "check_placement",
    "lower_bound",
    "place",
    "place_exact",
    "place_greedy",
    "warm_up",
]
