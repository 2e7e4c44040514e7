"""The same training steps with every block compiled, as the studies at this scale run them."""

import functools

from benchmarks.gpu.settings import Items, Settings
from benchmarks.gpu.throughput import chosen, compiled


def items(settings: Settings) -> Items:
    """In the order of the eager table."""
    return {name: functools.partial(compiled, settings, name, changes) for name, changes in chosen(settings).items()}
