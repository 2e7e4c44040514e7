"""`python benchmarks/depth.py`: what each depth mixer costs, beside the packages people would take instead.

One backbone, one run: every candidate takes turns with the residual alone, so that a drifting machine reaches both alike. A
peer is compared with the plain form of its own package, since packages differ in more than the mixer.
"""

import argparse
import functools
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

# Run as a script, Python looks for modules beside it only.
sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import models
from benchmarks.bounds import Bound, bounds_table, over_first
from benchmarks.conformance import all_mixers_are_right
from benchmarks.depth_peers import DepthPeer, depth_peers
from benchmarks.measure import Memory, Timing, bytes_per_second, header_lines, interleave, peak_memory
from benchmarks.peers import PeerShape
from benchmarks.profiles import print_missed
from twoaxis import generate
from twoaxis.core.cost import Shape
from twoaxis.ledger.decoder_memory import decoder_trace
from twoaxis.model.cost import decoder_cost

SHAPE = PeerShape()
NEW_TOKENS = 32
AT_ONCE = 9
"""Candidates that share the turns of the residual."""


@dataclass(frozen=True)
class Candidate:
    """One mixer at the benchmark's size, the bound of its training step, and the peer that does the same.

    Attributes:
        depth: the configuration.
        bound: largest ratio of its training step to the residual's, or None.
        peer: the name in `depth_peers`, or None where no installable package does the same.
    """

    depth: Any
    bound: float | None = None
    peer: str | None = None


CANDIDATES: dict[str, Candidate] = {
    "residual": Candidate("residual"),
    "residual_scalars": Candidate("residual_scalars", 1.02),
    "norm_placement post": Candidate({"kind": "norm_placement", "placement": "post"}, 1.03),
    "norm_placement layer_scaling": Candidate({"kind": "norm_placement", "placement": "layer_scaling"}, 1.03),
    "norm_placement deepnorm": Candidate({"kind": "norm_placement", "placement": "deepnorm"}, 1.03),
    "norm_placement sandwich": Candidate("norm_placement", 1.06),
    "norm_placement keel": Candidate({"kind": "norm_placement", "placement": "keel"}, 1.06),
    "residual_dual": Candidate("residual_dual"),
    "siamese_norm": Candidate("siamese_norm"),
    "elc_bert": Candidate("elc_bert"),
    "denseformer 1x1": Candidate("denseformer", 1.02),
    "denseformer 4x5": Candidate({"kind": "denseformer", "dilation": 4, "period": 5}),
    "vertical_attention": Candidate("vertical_attention"),
    "deep_cross_attention full": Candidate("deep_cross_attention", 1.12, "deep-cross-attention, all layers"),
    "muddformer": Candidate("muddformer", 1.08),
    "hyper_connections 4": Candidate({"kind": "hyper_connections", "n_streams": 4}, 1.15, "hyper-connections 4"),
    "mhc 4": Candidate({"kind": "mhc", "n_streams": 4}, 1.25, "hyper-connections mHC 4"),
    "mhc 4 delayed": Candidate({"kind": "mhc", "preset": "deepseek_v41"}, 1.25),
    "mhc 4 identity": Candidate({"kind": "mhc", "residual": "identity"}),
    "mhc 4 kronecker": Candidate({"kind": "mhc", "residual": "kronecker"}),
    "mhc 4 spectral": Candidate({"kind": "mhc", "residual": "spectral"}),
    "two_lanes": Candidate("two_lanes"),
    "gated_residual 4": Candidate({"kind": "gated_residual", "n_streams": 4}, 1.5),
    "frac_connections 4": Candidate({"kind": "frac_connections"}),
    "attention_residuals full": Candidate("attention_residuals", 1.18, "attn-res full"),
    "attention_residuals block 4": Candidate({"kind": "attention_residuals", "block_size": 4}, 1.07, "attn-res block"),
    "delta_attention_residuals": Candidate("delta_attention_residuals"),
    "depth_attention 8": Candidate({"kind": "depth_attention", "window": 8}, 1.15),
    "depth_attention 8, own": Candidate(
        {"kind": "depth_attention", "window": 8, "projections": "own", "granularity": "sublayer"}, 1.6
    ),
    "deep_delta": Candidate("deep_delta", 1.04),
    "deep_delta code": Candidate({"kind": "deep_delta", "value_target": "code"}, 1.04),
    "deep_delta CC": Candidate({"kind": "deep_delta", "value_channels": 4, "compressor": "channel"}, 1.12),
    "deep_delta TC": Candidate({"kind": "deep_delta", "value_channels": 4, "compressor": "time"}, 1.6),
    "laurel": Candidate("laurel"),
    "value_residual": Candidate("value_residual", None, "x-transformers value residual"),
    "value_embedding": Candidate("value_embedding"),
    "per_layer_embedding 32": Candidate({"kind": "per_layer_embedding", "d_embedding": 32}),
    "lime": Candidate("lime", None, "x-transformers LIMe"),
    "depth_value_mixing": Candidate("depth_value_mixing", 1.10),
    "mixture_of_depths_attention": Candidate("mixture_of_depths_attention", 1.35),
}


def run(rounds: int, names: Sequence[str] = (), compiled: bool = False) -> list[Bound]:
    """Prints the tables and returns the bounds.

    Args:
        rounds: samples of each candidate.
        names: the candidates besides the residual; empty means those with a bound or a peer, for training steps alone.
        compiled: whether to time compiled steps as well, which takes minutes per mixer.
    """
    held = [name for name, candidate in CANDIDATES.items() if candidate.bound or candidate.peer]
    chosen = {name: CANDIDATES[name] for name in ("residual", *(names or held))}
    timings = _against_residual(chosen, _step, rounds)
    saved = {name: saved_bytes(_step(candidate.depth)) for name, candidate in chosen.items()}
    decoding = _against_residual(chosen, _decoding, rounds) if names else {}
    memory = _peak_memory(chosen) if names else {}
    fast = _against_residual(chosen, _compiled_step, rounds) if compiled else {}
    print(f"### Depth mixers, {SHAPE}, training step and decoding of {NEW_TOKENS} tokens after 128, ratios to the residual\n")
    print("| mixer | step (min..max) | FLOPs | compiled | saved bytes | peak memory | decode | above residual / floor |")
    print("|---|---|---|---|---|---|---|---|")
    plain = _flops("residual")
    for name, candidate in chosen.items():
        t = timings[name]
        peak = f"{memory[name].step_bytes / memory['residual'].step_bytes:.2f}" if memory else "-"
        step = f"**{t.ratio:.2f}** ({t.lowest:.2f}..{t.highest:.2f})"
        flops = f"{_flops(candidate.depth) / plain:.2f}"
        kept, above = f"{saved[name] / saved['residual']:.2f}", _above_floor(candidate.depth, t)
        cells = (flops, _ratio(fast.get(name)), kept, peak, _ratio(decoding.get(name)), above)
        print(f"| {name} | {step} | {' | '.join(cells)} |")
    print()
    return [*_bounds(chosen, timings), *_peers(chosen, timings, saved, rounds)]


def _bounds(chosen: dict[str, Candidate], timings: dict[str, Timing]) -> list[Bound]:
    """The bounds of training steps; for those that are missed, prints where the time goes."""
    first = timings["residual"]
    bounds = {
        name: over_first(f"training step, {name} / residual", (first, timings[name]), candidate.bound)
        for name, candidate in chosen.items()
        if candidate.bound is not None
    }

    def limit(name: str) -> str:
        depth = chosen[name].depth
        return f"FLOPs {_flops(depth) / _flops('residual'):.2f} + states {_floor_seconds(depth) / first.seconds:.2f}"

    missed = {name: bound for name, bound in bounds.items() if not bound.kept}
    print_missed(missed, _step("residual"), lambda name: _step(chosen[name].depth), limit)
    return [*bounds.values()]


def _against_residual(
    chosen: dict[str, Candidate], build: Callable[[Any], Callable[[], object]], rounds: int
) -> dict[str, Timing]:
    """Times candidates in turns with the residual, a few at a time; only these are in memory."""
    plain, names = build("residual"), [name for name in chosen if name != "residual"]
    found: dict[str, Timing] = {}
    for first in range(0, max(1, len(names)), AT_ONCE):
        steps = {name: build(chosen[name].depth) for name in names[first : first + AT_ONCE]}
        found |= {timing.name: timing for timing in interleave({"residual": plain, **steps}, rounds=rounds, warmup=1)}
    return found


def _peak_memory(chosen: dict[str, Candidate]) -> dict[str, Memory]:
    """Memory of each in a process of its own, two of them at a time, since none is timed."""

    def measured(name: str) -> Memory:
        return peak_memory(functools.partial(models.training_step, SHAPE, chosen[name].depth))

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(chosen, pool.map(measured, chosen), strict=True))


def _step(depth: Any) -> Callable[[], Tensor]:
    return models.loss_step(models.decoder(SHAPE, depth), SHAPE.tokens())


def _decoding(depth: Any) -> Callable[[], object]:
    prompts = SHAPE.tokens(seed=1)[:1, :128].tolist()
    return functools.partial(generate, models.decoder(SHAPE, depth), prompts, NEW_TOKENS)


def _compiled_step(depth: Any) -> Callable[[], Tensor]:
    return models.compiled_step(models.decoder(SHAPE, depth), SHAPE.tokens())


def _ratio(timing: Timing | None) -> str:
    return "-" if timing is None else f"{timing.ratio:.2f}"


def saved_bytes(step: Callable[[], object]) -> int:
    """Bytes of the distinct storages that one step keeps for its backward pass."""
    storages: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        step()
    return sum(storages.values())


def _flops(depth: Any) -> int:
    """Floating-point operations of a forward pass."""
    return decoder_cost(models.config(SHAPE, depth), Shape(SHAPE.batch, SHAPE.max_seq_len)).flops


def _above_floor(depth: Any, timing: Timing) -> str:
    """What the mixer adds to the step over the time to move its states once forward and twice backward."""
    floor = _floor_seconds(depth)
    return f"{timing.seconds * (1 - 1 / timing.ratio) / floor:.1f}" if floor else "-"


def _floor_seconds(depth: Any) -> float:
    config = models.config(SHAPE, depth)
    stack, shape = config.stack, Shape(SHAPE.batch, SHAPE.max_seq_len)
    traced = decoder_trace(config, shape)
    extra = [traced.state_elements(site.index) - stack.d_model for site in stack.sites]
    # A read moves the state once; its backward pass reads the state again and writes as many gradients.
    return 3 * 4 * shape.total_tokens * sum(max(0, floats) for floats in extra) / bytes_per_second()


def _peers(chosen: dict[str, Candidate], timings: dict[str, Timing], saved: dict[str, int], rounds: int) -> list[Bound]:
    bounds: list[Bound] = []
    wanted = {candidate.peer: name for name, candidate in chosen.items() if candidate.peer}
    families: dict[str, list[DepthPeer]] = {}
    for peer in depth_peers(SHAPE, set(wanted)):
        families.setdefault(peer.package, []).append(peer)
    if families:
        print("### Packages, each against the plain form of its own model\n")
        print("| package | step / its plain form | ours / residual | saved bytes / its plain form | ours / residual |")
        print("|---|---|---|---|---|")
    for plain, *others in families.values():
        steps = {peer.name: peer.step for peer in (plain, *others)}
        # Some take seconds.
        ratios = {t.name: t for t in interleave(steps, rounds=min(2, rounds), warmup=1)}
        plain_saves = saved_bytes(plain.step)
        for peer in others:
            ours = wanted[peer.name]
            theirs, kept = ratios[peer.name].ratio, saved_bytes(peer.step) / plain_saves
            mine = saved[ours] / saved["residual"]
            print(f"| {peer.name} | {theirs:.2f} | {timings[ours].ratio:.2f} | {kept:.2f} | {mine:.2f} |")
            bounds.append(Bound(f"step over plain: {peer.name} / {ours}", theirs / timings[ours].ratio, 1.0, "at least"))
            bounds.append(Bound(f"saved bytes over plain: {peer.name} / {ours}", kept / mine, 1.0, "at least"))
    print()
    return bounds


def main() -> int:
    """Prints everything; 1 when a bound is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help=f"any of {', '.join(CANDIDATES)}; all by default")
    parser.add_argument("--rounds", type=int, default=5, help="samples of each candidate")
    parser.add_argument("--compiled", action="store_true", help="also time compiled steps")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.names if name not in CANDIDATES]
    if unknown:
        parser.error(f"unknown candidate {unknown[0]!r}: must be one of {', '.join(CANDIDATES)}")
    if not all_mixers_are_right():
        return 1
    print(header_lines())
    bounds = run(arguments.rounds, arguments.names or list(CANDIDATES)[1:], arguments.compiled)
    print(f"### Bounds\n\n{bounds_table(bounds)}")
    return 0 if all(bound.kept for bound in bounds) else 1


if __name__ == "__main__":
    sys.exit(main())
