"""Claim 10: a decoder that reads depth is the decoder in which ShortSWA runs on the transposed stack of its states.

Letters: B batch, T position, D width, L blocks, H heads, K depth window, N states so far.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from twoaxis.claims.claim import PAPER, ROUNDING, Claim, Evidence, EvidenceTable, Finding
from twoaxis.claims.toy_models import D_MODEL, TOKENS, decoder, tokens, weighted_sum
from twoaxis.core.layout import TokenLayout
from twoaxis.core.measure import gradients, noise, perturb
from twoaxis.core.position import LayerStack
from twoaxis.depth import DepthAttentionConfig
from twoaxis.depth.state_reader import StreamAndMemory
from twoaxis.model import Decoder
from twoaxis.ops.norm import rms_norm
from twoaxis.sequence import ShortSWAConfig

BLOCKS = 4
SEEDS = (0, 1)
WINDOWS: tuple[int | None, ...] = (1, 2, 3, BLOCKS, None)
HEAD_COUNTS = (1, 2, 4)

FORMS: dict[str, dict[str, Any]] = {
    "added through a matrix": {},
    "of raw states, the head reads too": {"states": "raw", "head": "read"},
    "added without a matrix": {"output": "none"},
    "in place of the stream": {"mode": "replace"},
}
"""Choices that the paper leaves open: use of the read, norm of the states, and a read by the head."""

VISIBLE = 1e-3

Run = tuple[Tensor, list[Tensor], list[Tensor]]
"""Logits, states, and reads."""


def transposed(model: Decoder, ids: Tensor) -> Run:
    """Runs the blocks of a decoder, with each read made by the sequence mixer `short_swa` on the states so far."""
    config: Any = model.config.depth
    layout, h, states, reads = TokenLayout.contiguous(TOKENS), model.embed(ids), list[Tensor](), list[Tensor]()

    def read(x: Tensor) -> Tensor:
        states.append(x)
        reads.append(short_swa_over(model, states)[-1])
        return x + reads[-1] if config.mode == "add" else reads[-1]

    for block in model.blocks:
        h = read(h)
        for sublayer in block.sublayers:  # type: ignore[operator,union-attr]
            h = h + sublayer.mixer(sublayer.norm(h), layout)[0]
    h = read(h) if config.head == "read" else h
    return model.logits(model.norm(h)), states, reads


def short_swa_over(model: Decoder, states: Sequence[Float[Tensor, "B T D"]]) -> list[Float[Tensor, "B T D"]]:
    """Runs ShortSWA with the weights of the model's reads, depth as positions and tokens as rows; one result per state."""
    config, N = model.config.depth, len(states)
    matrices: Any = model.ends
    assert isinstance(config, DepthAttentionConfig)
    B, T, D = states[0].shape
    width = config.width(D)
    options: dict[str, Any] = {
        "n_heads": config.n_heads,
        "n_kv_heads": config.n_heads,
        "head_dim": width // config.n_heads,
        "rope_dim": 0,
    }
    mixer = ShortSWAConfig(window=config.window or N, **options).build(LayerStack(D, 1e-6, (1,)).sites[0])
    projection = matrices.projection
    # A window of one state has no query and no key; their values do not matter.
    missing = projection.new_zeros(3 * width - projection.shape[0], D)
    output = matrices.output if config.output == "matrix" else torch.eye(D, dtype=projection.dtype)
    weights: Any = {"qkv.weight": torch.cat((missing, projection)), "output.weight": output}
    stack = torch.stack(tuple(states), dim=2).reshape(B * T, N, D)
    context = rms_norm(stack, matrices.gain, model.config.norm_eps) if config.states == "normalised" else stack
    update, _ = torch.func.functional_call(mixer, weights, (context, TokenLayout.contiguous(N)))
    return list(update.reshape(B, T, N, D).unbind(2))


def build(seed: int, **options: Any) -> Decoder:
    """Builds a perturbed decoder of four blocks with the mixer `depth_attention`."""
    return perturb(decoder(DepthAttentionConfig(**options), n_layers=BLOCKS, moved=False), seed)


def compare(found: Evidence, what: str, model: Decoder) -> int:
    """Compares logits and gradients of both decoders; returns the number of parameter tensors."""
    logits, (expected, states, reads) = model(tokens()), transposed(model, tokens())
    found.close(f"logits, {what}", logits, expected, ROUNDING)
    found.all_close(f"all reads by one call, {what}", short_swa_over(model, states), reads, ROUNDING)
    of_depth, of_positions = gradients(model, weighted_sum(logits)), gradients(model, weighted_sum(expected))
    for name, gradient in of_positions.items():
        largest = gradient.abs().max()
        found.close(f"gradients, {what}", of_depth[name] / largest, gradient / largest, ROUNDING)
        found.true(f"{name} has a gradient, {what}", bool(largest > 0))
    return len(of_positions)


def compute() -> Finding:
    """Compares both decoders over seeds, windows, heads and forms, and tests that matrices per reader break the duality."""
    found, cases, tensors = Evidence(), 0, set[int]()
    for seed, window, heads in itertools.product(SEEDS, WINDOWS, HEAD_COUNTS):
        model = build(seed, window=window, n_heads=heads)
        tensors.add(compare(found, f"window {window or 'all'}, {heads} heads", model))
        cases += 1
    rows = [("one set of matrices, states between blocks: the paper's", "ShortSWA on the transposed stack, exactly")]
    for name, options in FORMS.items():
        for window in (2, None):
            compare(found, name, build(0, window=window, n_heads=2, **options))
        rows.append((f"the same, {name}", "ShortSWA on the transposed stack, exactly"))
    check_own_matrices(found)
    rows.append(("matrices of each reader's own", "a relative: no single ShortSWA gives these reads"))
    windows = ", ".join("all" if window is None else str(window) for window in WINDOWS)
    return found.finding(
        f"{cases} decoders of {BLOCKS} blocks in float64: {len(SEEDS)} seeds, windows of {windows} states, "
        f"{', '.join(map(str, HEAD_COUNTS))} heads. The mixer depth_attention, and ShortSWA without rotation on the stack of "
        f"states with the same weights, give the same logits within 1e-12 and the same gradients of all {max(tensors)} "
        "parameter tensors within 1e-12 of the largest entry of each.",
        "One call of ShortSWA on the final stack gives the reads of all blocks at once.",
        "Sharing is what makes it the dual: where two windows hold the same states, ShortSWA gives the same result at both "
        "places whatever its weights are, and so does the read with shared matrices; with matrices per reader it does not.",
        table=EvidenceTable(("read over depth", "as a sequence operator"), tuple(rows)),
    )


@torch.no_grad()
def check_own_matrices(found: Evidence) -> None:
    """Compares two windows of the same two states at different depths, under each of the three operators."""
    before, older, newer = (noise((1, TOKENS, D_MODEL), f"claims/own {name}") for name in ("before", "older", "newer"))
    shared = build(0, window=2, n_heads=2)
    swa = short_swa_over(shared, (before, older, newer, older, newer))
    found.close("ShortSWA on equal windows", swa[2], swa[4], ROUNDING)
    depth = [read_at(shared, block, before, older, newer) for block in (2, 3)]
    found.close("shared matrices on equal windows", depth[0], depth[1], ROUNDING)
    found.close("shared matrices against ShortSWA", depth[0] - newer, swa[2], ROUNDING)
    own = build(0, window=2, n_heads=2, projections="own")
    depth = [read_at(own, block, before, older, newer) for block in (2, 3)]
    found.apart("own matrices on equal windows", depth[0], depth[1], VISIBLE)


def read_at(model: Decoder, block: int, *states: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
    """The stream after the read before a block, given the states before it and before the blocks below."""
    memory = StreamAndMemory(states[0], (), ())
    for index, x in enumerate(states, block + 1 - len(states)):
        reader: Any = next(iter(model.blocks[index].sublayers)).depth  # type: ignore[operator,union-attr,arg-type]
        _, memory, _ = reader.read(memory._replace(stream=x))
    return memory.stream


CLAIM = Claim(
    number=10,
    title="The duality holds inside a Transformer",
    statement="A decoder whose blocks read the last K states between blocks, with one W_Q, W_K and W_V for the whole model, is "
    "the decoder in which each of these reads is ShortSWA with window K on the states of the token: same logits, same "
    "gradients of all parameters.",
    source=f"{PAPER}, section 2.2",
    tested="Decoders with the shipped mixer depth_attention against the same blocks around the shipped mixer short_swa, run on "
    "the transposed stack of states with the same weights. The same with matrices per reader, on two equal windows.",
    compute=compute,
)
