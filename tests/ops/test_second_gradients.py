"""Gradients of gradients: every backward pass that is written by hand differentiates rightly, or refuses to."""

import importlib
import pkgutil
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradgradcheck
from torch.utils._pytree import tree_leaves

from twoaxis import ops
from twoaxis.core.errors import ConfigError
from twoaxis.ops.causal_conv import causal_conv
from twoaxis.ops.cross_entropy import linear_cross_entropy
from twoaxis.ops.delta import delta_writes
from twoaxis.ops.depth_attention import depth_attention
from twoaxis.ops.depth_read import depth_read, source_factor
from twoaxis.ops.gated_linear import silu_gate
from twoaxis.ops.gated_read import gated_read
from twoaxis.ops.grn import grn
from twoaxis.ops.hyper_read import ScoreRule, hyper_read
from twoaxis.ops.local_attention import local_attention
from twoaxis.ops.mix import mix, mix_heads
from twoaxis.ops.ngram_gate import ngram_gate
from twoaxis.ops.norm import inverse_rms, layer_norm, rms_norm
from twoaxis.ops.precision import Impl, plain_forms
from twoaxis.ops.reflected_attention import path_attention
from twoaxis.ops.rope import rotate
from twoaxis.ops.scores import joint_scores, linear_scores, row_product, stream_scores
from twoaxis.ops.sinkhorn import Sinkhorn, sinkhorn
from twoaxis.ops.streams import mix_pieces
from twoaxis.ops.token_taps import low_rank_conv
from twoaxis.ops.weight_mlp import weight_mlp

from .compare import normal

X, Y, WIDTH = (1, 3, 4), (1, 3), (4,)
HEADS = (1, 3, 2, 4)
RULE = ScoreRule("layer", 1e-3)
TARGETS = torch.tensor([0, 4, 2])


def turn(x: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and signed sines for three tokens."""
    angles = torch.arange(6).to(x).view(1, 3, 1, 2)
    return angles.cos().repeat(1, 1, 1, 2), torch.cat((-angles.sin(), angles.sin()), dim=-1)


def reflected(i: Impl, q: Tensor, k: Tensor, v: Tensor, w: Tensor, beta: Tensor) -> Tensor:
    """PaTH attention with directions of length 1."""
    return path_attention(q, k, v, w / w.norm(dim=-1, keepdim=True), 2 * beta.sigmoid(), impl=i)[0]


def beside(i: Impl, q: Tensor, k: Tensor, v: Tensor, score: Tensor, value: Tensor) -> Tensor:
    """Attention with one more key for each query."""
    return local_attention(q, k, v, beside=(score, value), impl=i)


BY_OPERATOR: dict[str, tuple[Callable[..., Any], Sequence[tuple[int, ...]]]] = {
    "causal_conv": (lambda i, x, w: causal_conv(x, w, impl=i), [X, (4, 2)]),
    "delta_writes": (lambda i, x, y, u, t, b: delta_writes((x, y), u, t, b, 0.1, impl=i), [X, X, X, (2, 1, 3), Y]),
    "depth_attention": (lambda i, q, k, v: depth_attention(q, [k, q], [v, k]), [HEADS] * 3),
    "depth_read": (lambda i, x, y, q: depth_read((x, y), [source_factor(v, 1e-3, i) for v in (x, y)], q, i), [X, X, WIDTH]),
    "depth_read of statistics": (
        lambda i, x, y, q: depth_read((x, y), [inverse_rms(v, 1e-3) for v in (x, y)], q, i),
        [X, X, WIDTH],
    ),
    "gated_read": (lambda i, x, y, g, a, b: gated_read((x, y), g, a, b, None, 1e-3, i)[0], [X, X, (2, 4), (2, 8), (8, 2)]),
    "grn": (lambda i, x, y, b, w: grn((x, y), b, w, "gelu", impl=i), [X, X, (2, 2, 4), (2, 2, 4)]),
    "hyper_read": (lambda i, x, y, s, g, w: hyper_read((x, y), s, g, w, None, RULE, i)[:2], [X, X, (2, 3), (3,), (3, 4)]),
    "joint_scores of a frozen map": (lambda i, x, y: joint_scores((x, y), normal(3, 8).to(x), 1e-3, i), [X, X]),
    "layer_norm": (lambda i, x, g, b: layer_norm(x, 1e-3, i, g, b), [X, WIDTH, WIDTH]),
    "layer_norm alone": (lambda i, x: layer_norm(x, 1e-3, i), [X]),
    "linear_cross_entropy": (lambda i, h, w: linear_cross_entropy(h, w, TARGETS, i), [(3, 4), (5, 4)]),
    "linear_scores": (lambda i, x, w: linear_scores(x, w, i), [X, (2, 4)]),
    "local_attention with a key beside": (beside, [(1, 2, 3, 4)] * 3 + [(1, 2, 3), (1, 2, 3, 4)]),
    "low_rank_conv": (lambda i, x, z, w: low_rank_conv(x, z, w, impl=i), [X, (1, 3, 2), (2, 2, 4)]),
    "mix": (lambda i, x, y, w: mix((x, y), w), [X, X, (2, 2)]),
    "mix_heads": (lambda i, x, y, w: mix_heads((x, y), w, i), [HEADS, HEADS, (3, 4)]),
    "mix_pieces": (lambda i, x, y, r, w: mix_pieces((x, y), x, r, w, 1, i), [X, X, (2, 2), (1, 2)]),
    "ngram_gate": (lambda i, q, k, g, v: ngram_gate(q, k, g, v, 1e-3, impl=i), [X, X, WIDTH, X]),
    "path_attention": (reflected, [(1, 1, 3, 4)] * 4 + [(1, 1, 3)]),
    "rms_norm": (lambda i, x, g: rms_norm(x, g, 1e-3, i), [X, WIDTH]),
    "rms_norm alone": (lambda i, x: rms_norm(x, None, 1e-3, i), [X]),
    "rotate": (lambda i, x: rotate(x, turn(x)), [HEADS]),
    "row_product": (lambda i, x, w: row_product(x, w, i), [X, WIDTH]),
    "silu_gate": (lambda i, x: silu_gate(x, i), [X]),
    "sinkhorn": (lambda i, x: sinkhorn(x, Sinkhorn(2), i), [(2, 2, 3)]),
    "stream_scores": (lambda i, x, y, w: stream_scores((x, y), w, 1e-3, i), [X, X, (2, 4)]),
    "weight_mlp": (lambda i, x, a, b, c: weight_mlp(x, a, b, c, None, 1e-3, "erf", i), [X, (2, 4), (3, 2), (3,)]),
}
"""Every operator with a backward pass of its own, and the shapes of its inputs."""

ALWAYS_RIGHT = {"layer_norm", "layer_norm alone", "linear_scores", "mix_heads", "row_product"}
"""They have gradients of gradients in every dtype."""

IN_PYTORCH = {"depth_attention", "depth_read", "depth_read of statistics", "mix", "mix_pieces", "rotate"}
"""They have them in float64, which C kernels do not serve."""

REFUSED = r"^create_graph=True: must be False, since .+ has first gradients alone; (pass|call|run) .+"


def sum_of_sines(made: Tensor | Sequence[Tensor]) -> Tensor:
    """One number of all results."""
    return torch.stack([x.sin().sum() for x in tree_leaves(made)]).sum()


def second_gradients(name: str, dtype: torch.dtype, impl: Impl = "fused") -> list[Tensor]:
    """The gradients of the squared length of an operator's gradients, in float64."""
    function, shapes = BY_OPERATOR[name]
    leaves = [normal(*shape, seed=seed).to(dtype).requires_grad_() for seed, shape in enumerate(shapes)]
    grads = torch.autograd.grad(sum_of_sines(function(impl, *leaves)), leaves, create_graph=True)
    length = torch.stack([grad.square().sum() for grad in grads]).sum()
    return [grad.double() for grad in torch.autograd.grad(length, leaves)]


@pytest.mark.parametrize("name", BY_OPERATOR)
def test_gradients_of_gradients_are_right_or_refused(name: str) -> None:
    function, shapes = BY_OPERATOR[name]
    leaves = [normal(*shape, seed=seed).requires_grad_() for seed, shape in enumerate(shapes)]
    assert gradgradcheck(lambda *given: sum_of_sines(function("reference", *given)), leaves, fast_mode=True)
    want = second_gradients(name, torch.float64, "reference")
    for dtype, budget, right in (
        (torch.float64, 1e-9, name in ALWAYS_RIGHT | IN_PYTORCH),
        (torch.float32, 1e-3, name in ALWAYS_RIGHT),
    ):
        same = partial(torch.testing.assert_close, expected=want, rtol=budget, atol=budget)
        if right:
            same(second_gradients(name, dtype))
            continue
        with pytest.raises(ConfigError, match=REFUSED) as refused:
            second_gradients(name, dtype)
        # What the message advises is tried.
        if "impl='reference'" in str(refused.value):
            same(second_gradients(name, dtype, "reference"))
        if "plain_forms()" in str(refused.value):
            with plain_forms():
                same(second_gradients(name, dtype))


def test_no_backward_pass_is_left_out() -> None:
    names = [found.name for found in pkgutil.walk_packages(ops.__path__, "twoaxis.ops.") if not found.name.endswith("_kernels")]
    defined = [one for name in names for one in vars(importlib.import_module(name)).values() if isinstance(one, type)]
    reached = set[type]()
    for function, shapes in BY_OPERATOR.values():
        for dtype in (torch.float32, torch.float64):
            leaves = [normal(*shape, dtype=dtype).requires_grad_() for shape in shapes]
            reached |= backward_passes(sum_of_sines(function("fused", *leaves)))
    left = {one for one in defined if issubclass(one, torch.autograd.Function)} - reached
    assert {one.__name__ for one in left} == {"_EarlyReads"}, "its kernels are for a GPU alone"
    with pytest.raises(ConfigError, match=r"^create_graph=True: must be False, since early_reads"):
        left.pop().backward(None)


def backward_passes(made: Tensor) -> set[type]:
    """The classes of all that is written by hand in the graph of a tensor."""
    waiting, seen = [made.grad_fn], set[Any]()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [before for before, _ in node.next_functions]
    return {type(node)._forward_cls for node in seen if hasattr(type(node), "_forward_cls")}
