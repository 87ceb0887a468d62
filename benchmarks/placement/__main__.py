"""Print bound, greedy, exact and seconds for every frozen instance.

``python -m benchmarks.placement [--seconds 10] [--generate]``
"""

from __future__ import annotations

import argparse
from time import perf_counter, process_time

from benchmarks.placement.instances import Instance, frozen, generate, write
from lowtide.place import check_placement, lower_bound, place_exact, place_greedy


def row(instance: Instance, seconds: float) -> str:
    """One line of the table."""
    problem, bound = instance.problem, lower_bound(instance.problem)
    started = perf_counter()
    greedy = place_greedy(problem)
    greedy_s = perf_counter() - started
    started = process_time()
    exact = place_exact(problem, seconds)
    exact_s = process_time() - started
    wrong = check_placement(problem, greedy) + check_placement(problem, exact.placement)
    return (
        f"| {instance.name} | {len(problem.blocks)} | {bound} | {greedy.arena_bytes / bound - 1:.1%} "
        f"| {greedy_s * 1e3:.1f} | {exact.placement.arena_bytes / bound - 1:.2%} | {exact.nodes} "
        f"| {exact_s:.2f} | {'optimal' if exact.proven else 'open'}{'; UNSOUND' if wrong else ''} |"
    )


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0, help="limit of the exact search, each")
    parser.add_argument("--generate", action="store_true", help="write the instance files again")
    options = parser.parse_args()
    if options.generate:
        for instance in generate():
            write(instance)
    instances = frozen()
    place_exact(instances[0].problem, 0.1)  # compiles
    print("| instance | blocks | bound (bytes) | greedy waste | ms | exact waste | nodes | CPU s | |")
    print("|---|---|---|---|---|---|---|---|---|")
    for instance in instances:
        print(row(instance, options.seconds), flush=True)


if __name__ == "__main__":
    main()
