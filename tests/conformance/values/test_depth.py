"""Every depth mixer is its equation, at every option: what each sublayer reads, and what is left."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from twoaxis.depth import DEPTH, DepthConfig, VerticalAttentionConfig

from . import depth_heads, depth_routes, depth_streams, depth_sums, depth_tables
from .cases import cases_of, rows_of
from .setting import LENGTHS, Ours, Setting, embeddings, stack_of

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
    stack = stack_of(config, lengths)
    ours = Ours(config, stack)
    views, left = ours.run(embeddings())
    setting = Setting(config, stack, dict(ours.state_dict()), embeddings())
    expected = equation_of(config.kind)(setting)
    assert [len(read) for read in views] == [len(read) for read in setting.views]
    for index, (got, want) in enumerate(zip(views, setting.views, strict=True)):
        for view, other in zip(got, want, strict=True):
            same(view, other, f"what sublayer {index} reads")
    same(left, expected, "what is left")


def same(got: Tensor, expected: Tensor, what: str) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-10, msg=lambda text: f"{what}: {text}")


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
