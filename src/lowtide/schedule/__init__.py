"""Orders with a small peak: heuristics, exact search, windows, incremental rescheduling."""

from lowtide.schedule.exact import ExactOrder, exact_order
from lowtide.schedule.heuristics import SCHEDULERS, best_order, best_schedule
from lowtide.schedule.incremental import Incremental, reorder, reschedule
from lowtide.schedule.judge import check_order
from lowtide.schedule.schedule import OrderProblem, Schedule, order_problem
from lowtide.schedule.warmup import warm_up

__all__ = [
    "SCHEDULERS",
    "ExactOrder",
    "Incremental",
    "OrderProblem",
    "Schedule",
    "best_order",
    "best_schedule",
    "check_order",
    "exact_order",
    "order_problem",
    "reorder",
    "reschedule",
    "warm_up",
]
