"""Checks of the declared design of a depth mixer against measurements.

Letters: B batch, T position, D width, S sources, P parts of the width.
"""

from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from twoaxis.core.design import Weights
from twoaxis.core.measure import distance, noise
from twoaxis.core.parameters import declarations, materialize
from twoaxis.depth import DepthConfig
from twoaxis.model import Decoder
from twoaxis.sequence import AttentionConfig
from twoaxis.testing.conformance import check, exactly, require
from twoaxis.testing.measured import equal_tokens, sublayer_list, tensors, trace
from twoaxis.testing.toy import ATTENTION, FEED_FORWARD, decoder_config, toy_decoder, toy_tokens

WIDTH, PARTS, LAYERS = 48, 4, 7
"""A quarter of the width has room for an orthonormal frame of all sources; no head or fraction of an example is narrower."""

N_HEADS = 4
BLOCK = ((AttentionConfig(n_heads=N_HEADS, head_dim=12),),)
"""With one sublayer in each block, outputs of sublayers and of blocks are the same sources."""

DEPTHS = (16, 32)
"""Numbers of sublayers between which a state grows only if it holds all sources; no window of an example is as long."""

THREE = (ATTENTION, FEED_FORWARD, FEED_FORWARD)
"""A block of odd length, which tells once per block from every second sublayer."""

RELATIVE = 1e-8
"""Above rounding, near 1e-13, and far below the changes to detect."""


class Inputs(NamedTuple):
    """The inputs of reads other than parameters: the embedding, all updates, and projected heads.

    `another` may replace any source: it is orthogonal to all.
    """

    another: Tensor
    embedding: Tensor
    updates: list[Tensor]
    heads: list[Any]


class Dependence(NamedTuple):
    """What the weights of a depth mixer depend on apart from parameters.

    Attributes:
        weights: as a design declares it.
        position: whether earlier tokens enter the weights or the sum.
    """

    weights: Weights
    position: bool


@check
def declared_weights_are_measured(config: DepthConfig) -> None:
    """Weights depend on the input, on the newest state and on earlier tokens exactly as the design declares."""
    found, design = measured_dependence(config), config.design
    exactly("what weights depend on", found.weights, design.weights)
    exactly("whether earlier tokens matter", found.position, design.position)


def measured_dependence(config: DepthConfig) -> Dependence:
    """Measures on noise what the weights of a depth mixer depend on.

    They depend on the input if another input changes the derivative of the read with respect to its sources, which no norm of a
    fixed sum does here. They depend on the reader if another newest state changes the weights of older sources by more than
    competition in a softmax can. Earlier tokens matter if equal tokens are read differently at different positions.
    """
    model = toy_decoder(config, d_model=WIDTH, n_layers=LAYERS, blocks=BLOCK)
    _even_norms(model)
    run = trace(model, toy_tokens())
    one, other = (_inputs(run, name) for name in ("one", "other"))
    newest = _with_newest(one)
    derivatives, weighted = _derivatives(model, one), _weights(model, one)
    on_input = _changes(derivatives, _derivatives(model, other)) and _changes(weighted, _weights(model, other))
    on_reader = (
        on_input
        and _changes(derivatives, _derivatives(model, newest))
        and not _only_competes(weighted, _weights(model, newest))
    )
    weights: Weights = "input and reader" if on_reader else "input" if on_input else "static"
    if config.design.weights == "static" and config.design.normaliser.startswith("norm"):
        # A norm after a matrix would be measured as a weight.
        weights = "static"
    alike = _read(model, _inputs(run, "alike", same_tokens=True))
    return Dependence(weights, _changes(alike, [t[:, :1].expand_as(t) for t in alike]))


@check
def declared_sharing_is_measured(config: DepthConfig) -> None:
    """Parameters exist once for the model, for each block that mixes, for each sublayer, or not at all, as declared."""
    with torch.device("meta"):
        few, many = (Decoder(decoder_config(config, n_layers=n, blocks=(THREE,))) for n in (4, 8))
    owned = [[_count(sublayer.depth) > 0 for sublayer in block.sublayers] for block in few.blocks]  # type: ignore[union-attr]
    per_block = max(sum(block) for block in owned)
    if _mixing(few) == 0:
        measured = "none"
    elif _mixing(few) == _mixing(many):
        measured = "model"
    else:
        measured = "sublayer" if per_block > 1 else "block"
    exactly("what has parameters of its own", measured, config.design.sharing)
    require(
        not config.design.literal or measured == "model",
        f"a literal instance of section 2.2: has parameters of its own: {measured}; must be the model alone",
    )


@check
def declared_window_is_measured(config: DepthConfig) -> None:
    """The depth state grows with depth exactly where the declared window begins with `all`."""
    few, many = (_largest_state(config, layers) for layers in DEPTHS)
    # A number for each sublayer may be a weight; a source is as wide as a head at least.
    exactly("whether more depth means more sources", many - few > DEPTHS[1] - DEPTHS[0], config.design.grows)


@torch.no_grad()
def _largest_state(config: DepthConfig, layers: int) -> int:
    """The most numbers of one token that any state holds; values do not matter, so parameters stay as memory has them."""
    model = materialize(lambda: Decoder(decoder_config(config, d_model=WIDTH, n_layers=layers, blocks=BLOCK)))
    states = trace(model, toy_tokens(batch=1, tokens=1)).states
    return max(sum(tensor.numel() for tensor in tensors(state)) for state in states)


@check
def declared_heads_are_measured(config: DepthConfig) -> None:
    """Heads of attention are left alone, mixed each by itself, or mixed with others, as declared."""
    model = toy_decoder(config, d_model=WIDTH, n_layers=LAYERS, blocks=BLOCK)
    if not any(sublayer.depth.mixes_heads for sublayer in sublayer_list(model)):
        exactly("how heads are mixed", "none", config.design.heads)
        return
    inputs = _inputs(trace(model, toy_tokens()), "heads")
    changed = [_with_other_head(heads, f"design/other head {index}") for index, heads in enumerate(inputs.heads)]
    before = _read(model, inputs)
    _change_first_head(sublayer_list(model)[-1].depth)
    after = _read(model, inputs._replace(heads=changed))
    across = _changes([x[:, :, 1:] for x in before], [x[:, :, 1:] for x in after])
    # With one query for each key, a group is a head.
    expected = "each" if config.design.heads == "groups" else config.design.heads
    exactly("how heads are mixed", "across" if across else "each", expected)


@torch.no_grad()
def _change_first_head(mixer: torch.nn.Module) -> None:
    """Changes what parameters of a mixer of heads hold for the first of the kv-heads."""
    for name, parameter in mixer.named_parameters(recurse=False):
        if N_HEADS in parameter.shape:
            first = parameter.select(parameter.shape.index(N_HEADS), 0)
            first.add_(noise(tuple(first.shape), f"design/first head of {name}"))


def _with_other_head(heads: Any, name: str) -> Any:
    """With another first query, key and value head."""
    parts = count()

    def other(x: Tensor) -> Tensor:
        part = next(parts)
        return torch.cat((noise(tuple(x[:, :, :1].shape), f"{name} {part}"), x[:, :, 1:]), dim=2) if x.ndim == 4 else x

    return tree_map(other, heads)


@torch.no_grad()
def _even_norms(model: Decoder) -> None:
    """Makes the gain of a norm the same for all channels, so that it turns no source; to a constant bias all are orthogonal."""
    for _, parameter, declaration in declarations(model):
        if declaration.tag == "norm":
            parameter.fill_(float(parameter.mean()))


def _count(module: torch.nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _mixing(model: Decoder) -> int:
    return _count(model.ends) + sum(_count(sublayer.depth) for sublayer in sublayer_list(model))


def _inputs(run: Any, name: str, same_tokens: bool = False) -> Inputs:
    """Orthonormal sources, rotated at random for each token, so that no norm of a fixed sum depends on the token.

    Heads, and keys that sublayers append to their output, are noise.
    """
    frame = _frame(tuple(run.left.shape[:2]), len(run.updates) + 2, f"design/{name}")
    another, embedding, *outputs = (frame[..., index] for index in range(frame.shape[-1]))
    updates = [
        torch.cat((output, noise(tuple(update.shape), f"design/{name}/{index}")[..., WIDTH:]), dim=-1)
        for index, (output, update) in enumerate(zip(outputs, run.updates, strict=True))
    ]
    heads = [
        tree_map(lambda like, at=index: noise(tuple(like.shape), f"design/{name}/heads {at} {tuple(like.shape)}"), each)
        for index, each in enumerate(run.heads)
    ]
    found = Inputs(another, embedding, updates, heads)
    # The inputs of the first token, at every position.
    return tree_map(lambda t: t[:, :1].expand_as(t).contiguous(), found) if same_tokens else found


def _with_newest(inputs: Inputs) -> Inputs:
    """Replaces the newest update that the reader can depend on, and the reader's own heads if they are mixed."""
    *older, newest, last = inputs.updates
    replaced = torch.cat((inputs.another, noise(tuple(newest.shape), "design/newest")[..., WIDTH:]), dim=-1)
    own = tree_map(lambda like: noise(tuple(like.shape), f"design/newest heads {tuple(like.shape)}"), inputs.heads[-1])
    return inputs._replace(updates=[*older, replaced, last], heads=[*inputs.heads[:-1], own])


def _frame(shape: tuple[int, int], sources: int, name: str) -> Tensor:
    """Vectors [B T D S] of rms 1 that are orthogonal within each part of the width, and to a constant."""
    parts = noise((*shape, PARTS, WIDTH // PARTS, sources), name)
    constant = torch.ones(*shape, PARTS, WIDTH // PARTS, 1, dtype=parts.dtype)
    orthonormal = torch.linalg.qr(torch.cat((constant, parts), dim=-1)).Q[..., 1:]
    return orthonormal.flatten(2, 3) * (WIDTH // PARTS) ** 0.5


def _read(model: Decoder, inputs: Inputs) -> list[Tensor]:
    """The views of the last sublayer for given updates, or its heads if they are mixed along depth."""
    (state, _), sublayers = model.ends.enter(inputs.embedding), sublayer_list(model)
    seen, layout = list[Tensor](), equal_tokens(inputs.embedding)
    for index, sublayer in enumerate(sublayers):
        views, carry, _ = sublayer.depth.read(state, layout)
        context, seen = sublayer.normalise(views), tensors(views)
        if sublayer.depth.mixes_heads:
            mixed, state = sublayer.depth.mix_heads(inputs.heads[index], context, state, layout)
            # Without parameters that heads carry.
            seen = [x for x in tensors(mixed) if x.ndim > 2] or seen
        if index + 1 < len(sublayers):
            state = sublayer.depth.write(state, inputs.updates[index], context, carry)
    return seen


def _sources(inputs: Inputs) -> list[Tensor]:
    """The sources older than the newest update that the reader can depend on."""
    return [inputs.embedding, *inputs.updates[:-2], *tensors(inputs.heads[:-1])]


def _derivatives(model: Decoder, inputs: Inputs) -> list[Tensor]:
    """The derivatives of a fixed combination of the read with respect to each older source."""
    leaves = tree_map(lambda t: t.clone().requires_grad_(), inputs)
    seen = _read(model, leaves)
    total = sum((view * noise(tuple(view.shape), f"design/view {part}")).sum() for part, view in enumerate(seen))
    found = torch.autograd.grad(total, _sources(leaves), allow_unused=True)  # type: ignore[arg-type]
    return [torch.zeros_like(s) if g is None else g for s, g in zip(_sources(leaves), found, strict=True)]


@torch.no_grad()
def _weights(model: Decoder, inputs: Inputs) -> list[Tensor]:
    """The part [B T P S] of each view that lies along each source, within each part of the width; the newest comes last."""
    sources = [inputs.embedding, *(update[..., :WIDTH] for update in inputs.updates[:-1])]
    basis = torch.stack(sources, dim=-1).unflatten(2, (PARTS, -1))
    found = []
    for view in _read(model, inputs):
        if view.shape == inputs.embedding.shape:
            parts = view.unflatten(2, (PARTS, -1)).unsqueeze(-1)
            found.append((basis * parts).mean(-2))
        else:
            found.append(view)
    return found


def _only_competes(before: list[Tensor], after: list[Tensor]) -> bool:
    """Whether the newest source changes the weights of older ones by a common factor and offset only.

    So it is in a softmax with a learned query: all weights shrink when another grows.
    """
    if not _changes(before, after) or any(t.shape[-1] != LAYERS or t.ndim != 4 for t in before):
        return False
    older = [(_older(one), _older(two)) for one, two in zip(before, after, strict=True)]
    return _changes([a for a, _ in older], [b for _, b in older]) and not _changes(
        [_shape(a) for a, _ in older], [_shape(b) for _, b in older]
    )


def _older(weights: Tensor) -> Tensor:
    """The weights of sources that are not summed into one with the newest."""
    older, own = weights[..., :-1], weights[..., -1:]
    apart = (older - own).abs().flatten(0, -2).amax(0) > RELATIVE
    return older[..., apart] if apart.any() else older


def _shape(weights: Tensor) -> Tensor:
    centred = weights - weights.mean(-1, keepdim=True)
    return centred / centred.norm(dim=-1, keepdim=True).clamp(min=RELATIVE)


def _changes(one: list[Tensor], other: list[Tensor]) -> bool:
    """Whether any pair differs by more than rounding."""
    largest = max((float(t.detach().abs().max()) for t in one), default=0.0)
    return max((distance(a, b) for a, b in zip(one, other, strict=True)), default=0.0) > RELATIVE * max(largest, RELATIVE)
