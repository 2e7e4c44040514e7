"""Every depth mixer is its equation, at every option: what each sublayer reads, what is left, and their gradients."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from twoaxis.depth import DEPTH, DepthConfig, VerticalAttentionConfig

from . import depth_heads, depth_routes, depth_streams, depth_sums, depth_tables
from .cases import cases_of, rows_of
from .setting import LENGTHS, Ours, Setting, embeddings, same, stack_of

Equation = Callable[[Setting], Tensor]


def equation_of(kind: str) -> Equation:
    """The function that is called as the mixer is."""
    modules = (depth_sums, depth_routes, depth_streams, depth_heads, depth_tables)
    found = [getattr(module, kind) for module in modules if hasattr(module, kind)]
    assert found, f"depth mixer {kind!r} has no equation in tests/conformance/values; write it as a function of this name"
    return found[0]


CASES = [pytest.param(case.config, id=case.name) for row in rows_of(DEPTH) for case in cases_of(row)]


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("config", CASES)
def test_is_its_equation(config: DepthConfig, lengths: tuple[int, ...]) -> None:
    stack, x = stack_of(config, lengths), embeddings()
    ours = Ours(config, stack)
    views, left = ours.run(x)
    setting = Setting(config, stack, ours.state_dict(keep_vars=True), x)
    expected = equation_of(config.kind)(setting)
    assert [len(read) for read in views] == [len(read) for read in setting.views]
    read, wanted = ([view for each in found for view in each] for found in (views, setting.views))
    same([*read, left], [*wanted, expected], {"embeddings": x, **dict(ours.named_parameters())})


NORMS: list[Any] = [
    ("sources", "rms"),
    ("sources", "layer"),
    ("sources", "l2"),
    ("weights", "rms"),
    ("sum", "l2"),
    ("none", "rms"),
]
"""What is normalised in vertical attention, and how."""
CHOICES: tuple[Any, ...] = (
    ("delta", "output"),
    ("none", "added", "gated"),
    NORMS,
    ("last", "mixture"),
    ("source", "first_input"),
    ("block", "sublayer"),
)
RECONSTRUCTED = [
    VerticalAttentionConfig(
        source=source, skip=skip, norm=norm, norm_kind=kind, head=head, embedding=embedding, granularity=granularity
    )
    for places in itertools.product(*(range(len(choices)) for choices in CHOICES))
    # A third of all combinations, in which any four choices of different options meet.
    if sum(places) % 3 == 0
    for source, skip, (norm, kind), head, embedding, granularity in [[c[at] for c, at in zip(CHOICES, places, strict=True)]]
]
"""Its options are guesses, so that any of them may be combined."""


def options_of(config: VerticalAttentionConfig) -> str:
    names = ("source", "skip", "norm", "norm_kind", "head", "embedding", "granularity")
    return "-".join(getattr(config, name) for name in names)


@pytest.mark.parametrize("config", RECONSTRUCTED, ids=options_of)
def test_vertical_attention_under_every_option(config: VerticalAttentionConfig) -> None:
    test_is_its_equation(config, LENGTHS[1])
