"""Where the time of a step goes, by torch's profiler: what stands behind a bound that is missed."""

from collections import Counter
from collections.abc import Callable, Mapping

from torch.profiler import ProfilerActivity, profile

from benchmarks.bounds import Bound

NAMED = 5
"""Operations that a row names."""

PRODUCTS, ATTENTION = ("mm", "addmm", "bmm", "baddbmm"), "scaled_dot_product"
"""Names of matrix products, and how those of attention begin."""


def is_product(operation: str) -> bool:
    """Whether an operation is a matrix product or attention."""
    short = operation.strip("_")
    return short in PRODUCTS or short.startswith(ATTENTION)


def by_operation(step: Callable[[], object]) -> Counter[str]:
    """The seconds of one step that each operation of torch takes on its own, those that it calls aside."""
    step()
    with profile(activities=[ProfilerActivity.CPU]) as found:
        step()
    spent: Counter[str] = Counter()
    for event in found.key_averages():
        spent[event.key.removeprefix("aten::")] += event.self_cpu_time_total / 1e6
    return spent


def print_missed(
    missed: Mapping[str, Bound],
    plain: Callable[[], object],
    build: Callable[[str], Callable[[], object]],
    limit: Callable[[str], str],
) -> None:
    """Prints, for each missed bound, which operations take the time beyond the plain step, and the least that they could.

    Args:
        missed: by the names of candidates.
        plain: the step that the ratio is over.
        build: the step of a candidate.
        limit: the ratio that its arithmetic and memory alone would give, in words.
    """
    if not missed:
        return
    base = by_operation(plain)
    print("| missed bound | measured | limit | operations that take the time beyond the plain step, ms |\n|---|---|---|---|")
    for name, bound in missed.items():
        more = by_operation(build(name))
        more.subtract(base)
        named = ", ".join(f"{operation} {seconds * 1e3:.0f}" for operation, seconds in more.most_common(NAMED))
        print(f"| {name} | {bound.measured:.2f} | {limit(name)} | {named}; all {sum(more.values()) * 1e3:.0f} |")
    print()
