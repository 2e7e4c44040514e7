"""Pipelines to run, and what the undivided decoder makes of the same data."""

from dataclasses import dataclass
from typing import Any

import torch

from twoaxis.core.layout import TokenLayout
from twoaxis.core.measure import perturb
from twoaxis.depth import DEPTH
from twoaxis.model import Decoder, DecoderConfig
from twoaxis.planner.model.shape import ModelShape
from twoaxis.train.parallel.boundaries import PipelineConfig

from ..payload import payload
from .pipeline_worker import LEARNING_RATE, STEPS, VOCABULARY, StrangeConfig, batch

BLOCKS = [[{"kind": "attention", "n_heads": 2}, "swiglu"]]
LENGTH = 6
ROWS_AT_ONCE = 2

LOOPED = {"ranks": 2, "schedule": "interleaved", "virtual": 2}
ORDERS: dict[str, dict[str, Any]] = {
    "gpipe": {"ranks": 2, "schedule": "gpipe"},
    "1f1b": {"ranks": 2, "schedule": "1f1b", "recompute": "block"},
    "1f1b of 3": {"ranks": 3, "schedule": "1f1b"},
    "interleaved": LOOPED,
    "cached_own": {**LOOPED, "forwarding": "cached_own", "recompute": "block"},
}


@dataclass(frozen=True)
class Case:
    """One pipeline of one decoder."""

    name: str
    decoder: DecoderConfig
    pipeline: PipelineConfig
    documents: bool = False
    evaluate: bool = False
    steps: int = STEPS

    @property
    def shape(self) -> tuple[int, int]:
        """Rows of a batch, and tokens in a row."""
        return self.pipeline.microbatches * ROWS_AT_ONCE, LENGTH

    def data(self) -> dict[str, Any]:
        """As the processes read it."""
        return {
            "name": self.name,
            "decoder": self.decoder.to_data(),
            "pipeline": self.pipeline.to_data(),
            "rows": self.shape[0],
            "length": self.shape[1],
            "documents": self.documents,
            "evaluate": self.evaluate,
            "steps": self.steps,
        }


def decoder(depth: Any, n_layers: int = 4, **changes: Any) -> DecoderConfig:
    """A small decoder around a depth mixer."""
    data = {"vocab_size": VOCABULARY, "d_model": 8, "n_layers": n_layers, "depth": depth, "blocks": BLOCKS, **changes}
    return DecoderConfig.from_data(data)


def pipeline(**data: Any) -> PipelineConfig:
    """A pipeline of four microbatches unless it says otherwise."""
    return PipelineConfig.from_data({"microbatches": 4, **data})


STATES = ("residual", "attention_residuals", "mhc", "muddformer", "value_residual")
"""One stream, a history, several streams, views apart, and heads that are carried."""

OTHER_ORDERS = {
    "gpipe": ("muddformer",),
    "1f1b": ("attention_residuals", "value_residual"),
    "1f1b of 3": ("deep_delta", "mhc"),
    "interleaved": ("attention_residuals", "mhc", "value_residual"),
}
"""Those that special cases lack: an order does the same whatever the tensors are, and differs from others with few kinds."""


def cases() -> dict[str, Case]:
    """Every depth mixer in the order that asks most of it, one of every kind in other orders, and what is special, by name."""
    depths = {row.kind: row.example(next(iter(row.examples))) for row in DEPTH}
    more = {
        "norm_placement": ("layer_scaling", "deepnorm", "keel"),
        "attention_residuals": ("block2", "two_phase"),
        "mhc": ("deepseek_v4", "deepseek_v41"),
        "muddformer": ("qkvr",),
    }
    for kind, names in more.items():
        depths |= {f"{kind} {name}": DEPTH[kind].example(name) for name in names}
    orders = [(name, order) for order, names in OTHER_ORDERS.items() for name in names]
    usual = [Case(f"{name} {order}", decoder(depths[name]), pipeline(**ORDERS[order])) for name, order in orders]
    for name, depth in depths.items():
        # One step of few microbatches shows what a mixer hands on, and five kinds show what steps leave behind.
        few: dict[str, Any] = {} if name in STATES else {"microbatches": 2}
        steps = STEPS if name in STATES else 1
        usual.append(Case(f"{name} cached_own", decoder(depth), pipeline(**ORDERS["cached_own"], **few), steps=steps))
    return {case.name: case for case in [*usual, *looped_cases(), *special_cases()]}


def looped_cases() -> list[Case]:
    """Three ranks with two stages each; those in the middle hand on tensors that only later stages of their rank read."""
    looped = {"ranks": 3, "schedule": "interleaved", "virtual": 2}
    histories: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
        "attention_residuals": ({"block_size": 2}, ("naive", "cached", "cached_own")),
        "denseformer": ({"dilation": 2}, ("cached_own",)),
        "muddformer": ({"ways": "single", "dilation": 2, "period": 2}, ("cached", "cached_own")),
        "value_residual": ({"variant": "dense"}, ("naive", "cached_own")),
        "lime": ({}, ("cached_own",)),
        "depth_value_mixing": ({"stride": 2, "recent_window": 1}, ("cached", "cached_own")),
        "mixture_of_depths_attention": ({}, ("naive", "cached_own")),
    }
    found = []
    for kind, (options, ways) in histories.items():
        model = decoder({"kind": kind, **options}, 6)
        for way in ways:
            # A second round of microbatches, and a second step, for one of them.
            twice = (kind, way) == ("attention_residuals", "cached_own")
            divided = pipeline(**looped, forwarding=way, microbatches=6 if twice else 3)
            found.append(Case(f"{kind} {way} of 3", model, divided, steps=STEPS if twice else 1))
    return found


def special_cases() -> list[Case]:
    """What else a pipeline has to cope with."""
    history = decoder("attention_residuals")
    keys = decoder({"kind": "attention_residuals", "key_rank": 3})
    deep = {"ranks": 2, "schedule": "interleaved", "virtual": 3, "forwarding": "cached_own"}
    strange = decoder(StrangeConfig())
    lent = decoder({"kind": "depth_attention", "n_heads": 2, "window": 3, "head": "read"}, 6)
    own = decoder({"kind": "depth_attention", "n_heads": 2, "projections": "own", "head": "read"})
    looped = {**LOOPED, "ranks": 3, "microbatches": 3}
    smeared = decoder("residual", embedding_norm="rms", embedding_local={"kind": "smear", "gate_channels": 4})
    local = decoder("denseformer", blocks=[[{"kind": "short_swa", "window": 4}, {"kind": "kv_shift", "n_heads": 2}], ["relu2"]])
    tables = decoder("residual", blocks=[[{"kind": "ngram_embedding", "rows": [53]}, "attention", "swiglu"], ["relu2"]])
    return [
        Case("attention_residuals cached", history, pipeline(**LOOPED, forwarding="cached")),
        Case("three stages on each rank, unequal", decoder("attention_residuals", 7), pipeline(**deep), steps=1),
        Case("packed documents", history, pipeline(**ORDERS["cached_own"]), documents=True, evaluate=True),
        Case("a head of its own", decoder("residual", tie_embeddings=False), pipeline(**ORDERS["1f1b"])),
        Case("a norm behind the embedding", decoder("residual", embedding_norm="rms"), pipeline(**ORDERS["1f1b"])),
        Case("a local mixer behind the embedding", smeared, pipeline(**ORDERS["1f1b"]), documents=True, evaluate=True),
        Case("parameters in the ends", keys, pipeline(**ORDERS["1f1b of 3"]), evaluate=True),
        Case("parameters of the ends in every stage", lent, pipeline(**looped, forwarding="cached_own"), evaluate=True),
        Case("parameters that the last stage alone uses", own, pipeline(**ORDERS["1f1b of 3"])),
        Case("evaluated", history, pipeline(**ORDERS["gpipe"]), evaluate=True),
        Case("sublayers of many kinds", local, pipeline(**ORDERS["interleaved"])),
        Case("tables of tokens", tables, pipeline(**ORDERS["1f1b of 3"]), documents=True, evaluate=True),
        Case("strange state", strange, pipeline(**ORDERS["interleaved"])),
        Case("strange state cached", strange, pipeline(**ORDERS["cached_own"])),
    ]


def undivided(case: Case) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses and gradients of the whole decoder on one process, step by step."""
    model = Decoder.build(case.decoder).double()
    perturb(model)
    tokens, targets, documents = batch(case.shape)
    losses, gradients = [], {}
    for step in range(case.steps):
        layout = TokenLayout.packed(documents) if case.documents else None
        loss, _ = model.loss(tokens, targets, layout)
        loss.backward()
        losses.append(loss.item())
        gradients |= {f"{step}/{name}": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= LEARNING_RATE * parameter.grad
    return losses, gradients


def planned_bytes(case: Case) -> list[int]:
    """Bytes that the planner has cross each boundary in one direction in one step."""
    config, shape = case.pipeline, ModelShape.of_decoder(case.decoder)
    plan = payload(shape, config.ranks, config.virtual, config.forwarding, torch.float64.itemsize)
    return [case.shape[0] * case.shape[1] * hop for hop in plan.hops]
