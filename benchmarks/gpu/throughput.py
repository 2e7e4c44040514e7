"""A training step and greedy decoding of a decoder of GPT-2's small shape with every mixer, in turns with the plain one.

The step is forward and backward in bfloat16 autocast; the optimizer, which costs every mixer the same, is left out. Memory is
what a step needs beyond the parameters.
"""

import functools
import time
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.depth import CANDIDATES
from benchmarks.gpu.settings import Items, Row, Settings
from benchmarks.gpu.timing import Candidate, peak_mib, ratios, timed
from twoaxis import DEPTH, Decoder, generate
from twoaxis.data import Batch
from twoaxis.train.recipe import TrainConfig
from twoaxis.train.token_loss import TokenLoss

STUDIED = (
    "deep_delta",
    "deep_delta CC",
    "attention_residuals block 4",
    "muddformer",
    "mhc 4",
    "denseformer 1x1",
    "residual_scalars",
)
"""The arms of the studies at this scale; they come first."""

GIB_PER_WINDOW = 4
"""Device memory for which one window of 1024 tokens is taken into the batch, so that the widest state still fits."""

LARGEST_BATCH = 16

CLOSE_NATS = 0.02
"""How far the compiled loss may be from the eager one, per token: bfloat16 rounds otherwise when operations are fused."""


class Shape(NamedTuple):
    """The size of the model and of a batch."""

    n_layers: int
    d_model: int
    n_heads: int
    tokens: int
    vocab_size: int
    prompt_tokens: int
    new_tokens: int
    batch: int


def shape_for(settings: Settings) -> Shape:
    """12 blocks of width 768 and 1024 tokens, and as many windows as the device holds."""
    if settings.size == "small":
        return Shape(2, 32, 2, 16, 32, prompt_tokens=4, new_tokens=3, batch=2)
    windows = LARGEST_BATCH
    if settings.on_gpu:
        fit = int(torch.cuda.get_device_properties(settings.device).total_memory / 2**30 / GIB_PER_WINDOW)
        # A power of two, since others would make products of awkward sizes.
        windows = min(LARGEST_BATCH, 1 << max(0, fit.bit_length() - 1))
    return Shape(12, 768, 12, 1024, 50304, prompt_tokens=128, new_tokens=32, batch=windows)


def models(n_heads: int) -> dict[str, dict[str, Any]]:
    """What is changed in the plain model, by name: the studied depth mixers, the local ones, then all other depth mixers."""
    attention: dict[str, Any] = {"kind": "attention", "n_heads": n_heads}
    canon: dict[str, Any] = {"input_local": "canon", "projected_local": "canon"}
    swa = {"kind": "short_swa", "n_heads": n_heads}
    local = {
        "short_swa 16": [{**swa, "window": 16}, attention, "swiglu"],
        "short_swa 128": [{**swa, "window": 128}, attention, "swiglu"],
        "short_conv": ["short_conv", attention, "swiglu"],
        "canon ABCD": [{**attention, **canon}, {"kind": "swiglu", **canon}],
    }
    depths = {name: candidate.depth for name, candidate in CANDIDATES.items()}
    covered = {DEPTH.parse(depth).to_data()["kind"] for depth in depths.values()}
    depths |= {row.kind: row.kind for row in DEPTH if row.kind not in covered}
    found: dict[str, dict[str, Any]] = {name: {"depth": depths[name]} for name in STUDIED}
    found |= {name: {"blocks": [block]} for name, block in local.items()}
    found |= {name: {"depth": depth} for name, depth in depths.items()}
    return {name: changes for name, changes in found.items() if name != "residual"}


def items(settings: Settings) -> Items:
    """Eager steps and decoding, the plain model first."""
    return {name: functools.partial(_eager, settings, name, changes) for name, changes in chosen(settings).items()}


def chosen(settings: Settings) -> dict[str, dict[str, Any]]:
    """The plain model and all others, or those that walk different paths."""
    found = {"residual": {}, **models(shape_for(settings).n_heads)}
    return settings.pick(found, {name: found[name] for name in ("residual", "deep_delta", "canon ABCD")})


class Bench:
    """One decoder with its batch, as a recipe would run it.

    Args:
        settings: device and size.
        changes: to the plain model.
        compiled: `off` or `block`.
    """

    def __init__(self, settings: Settings, changes: dict[str, Any], compiled: str = "off") -> None:
        self.shape = shape = shape_for(settings)
        block = [{"kind": "attention", "n_heads": shape.n_heads}, "swiglu"]
        sizes = {"d_model": shape.d_model, "n_layers": shape.n_layers, "max_seq_len": shape.tokens}
        recipe = TrainConfig.from_data(
            {
                "model": {**sizes, "blocks": [block], **changes},
                "data": {"seq_len": shape.tokens},
                "precision": "bfloat16",
                "compile": compiled,
                "device": settings.device,
            }
        )
        self.model = Decoder.build(recipe.decoder(shape.vocab_size)).to(settings.device)
        self.token_loss = TokenLoss(self.model, recipe)
        text = torch.randint(shape.vocab_size, (shape.batch, shape.tokens + 1), generator=torch.Generator().manual_seed(0))
        self.batch = Batch(text[:, :-1].contiguous(), text[:, 1:].contiguous(), None)

    def step(self) -> Tensor:
        """Forward and backward; returns the mean loss."""
        self.model.zero_grad(set_to_none=True)
        loss = self.token_loss(self.batch) / self.batch.tokens.numel()
        loss.backward()
        return loss.detach()

    def peak_mib(self, settings: Settings) -> float | None:
        """The most that a step needs beyond the parameters."""
        self.model.zero_grad(set_to_none=True)
        return peak_mib(self.step, settings)

    @property
    def tokens(self) -> int:
        """That one step reads."""
        return self.batch.tokens.numel()


@functools.cache
def _plain(settings: Settings) -> Bench:
    return Bench(settings, {})


@functools.cache
def _plain_decoding(settings: Settings) -> Candidate:
    return _decoding(settings, Bench(settings, {}).model)


def _decoding(settings: Settings, model: Decoder) -> Candidate:
    shape = shape_for(settings)
    prompts = _plain(settings).batch.tokens[:1, : shape.prompt_tokens].tolist()
    return functools.partial(generate, model.to(torch.bfloat16), prompts, shape.new_tokens)


def _eager(settings: Settings, name: str, changes: dict[str, Any]) -> list[Row]:
    plain, same = _plain(settings), name == "residual"
    bench = plain if same else Bench(settings, changes)
    first = plain.step
    steps: dict[str, Candidate] = {"residual": first} if same else {"residual": first, name: bench.step}
    step = timed(steps, settings)[-1]
    finite = bool(bench.step().isfinite())
    memory, of_plain = bench.peak_mib(settings), _plain_memory(settings)
    row: Row = {"mixer": name, "step ms": 1e3 * step.seconds, **ratios(step), "tokens/s": bench.tokens / step.seconds}
    row |= {"peak MiB": memory, "peak to residual": memory and of_plain and memory / of_plain}
    bench.model.zero_grad(set_to_none=True)
    own = _plain_decoding(settings)
    decode = timed({"residual": own} if same else {"residual": own, name: _decoding(settings, bench.model)}, settings, 1)[-1]
    speed = bench.shape.new_tokens / decode.seconds
    return [{**row, "decode ratio": decode.ratio, "decode tokens/s": speed, "ok": finite}]


@functools.cache
def _plain_memory(settings: Settings) -> float | None:
    return _plain(settings).peak_mib(settings)


def compiled(settings: Settings, name: str, changes: dict[str, Any]) -> list[Row]:
    """A step whose blocks are compiled, in turns with the eager plain one, and how far its loss is from the eager loss."""
    torch.compiler.reset()
    plain, bench = _plain(settings), Bench(settings, changes, "block")
    with torch.compiler.set_stance("force_eager"):
        eager_loss = float(bench.step())
    begin = time.perf_counter()
    loss = float(bench.step())
    seconds = time.perf_counter() - begin
    step = timed({"residual, eager": plain.step, name: bench.step}, settings)[-1]
    return [
        {
            "mixer": name,
            "step ms": 1e3 * step.seconds,
            **ratios(step),
            "tokens/s": bench.tokens / step.seconds,
            "peak MiB": bench.peak_mib(settings),
            "first step, s": seconds,
            "nats from eager": abs(loss - eager_loss),
            "ok": abs(loss - eager_loss) <= CLOSE_NATS,
        }
    ]
