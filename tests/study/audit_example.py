"""Made-up audits of four kinds of arms: routing over sources, gates of delta writes, parallel streams, and the plain stream."""

import math

import numpy as np

from twoaxis.audit.result import Ablation, Audit, AuditedSublayer, ClassRouting, Effort, Gain, Gates, Norms, Routing, Streams

AUDITED = {
    "residual": "residual",
    "block_attnres": "attention_residuals",
    "muddformer": "muddformer",
    "deep_delta": "deep_delta",
    "mhc": "mhc",
}
"""Arms of the example that have an audit, and the kind of their depth mixer."""

N_BLOCKS = 4
KINDS = ("attention", "swiglu")


def example_audit(arm: str) -> Audit:
    """The audit of one arm."""
    depth, noise = AUDITED[arm], np.random.default_rng(list(arm.encode()))
    places = tuple(
        AuditedSublayer(index=2 * block + at, block=block, kind=KINDS[at]) for block in range(N_BLOCKS) for at in range(2)
    )
    n = len(places)
    routing = (
        tuple(_routing(index, noise) for index in range(1, n + 1)) if depth in ("attention_residuals", "muddformer") else ()
    )
    gates = tuple(_gates(index, noise) for index in range(n)) if depth == "deep_delta" else ()
    removed = [_ablation("sublayer", index, places[index].kind, by, noise) for index in range(n) for by in ("zero", "mean")]
    for one in routing:
        favourite = one.classes["all"].favourite
        removed.append(_ablation("source", one.sublayer, favourite, "zero", noise, "favourite"))
    streams = None
    if depth == "mhc":
        gain = tuple(
            Gain(sublayer=index, row=1.0, column=1.0 + 0.01 * index, spectral=1.0 + 0.02 * index) for index in range(n)
        )
        streams = Streams(names=("0", "1", "2", "3"), spread=tuple(0.02 * index for index in range(n + 1)), gain=gain)
    return Audit(
        step=2000,
        depth=depth,
        seed=0,
        tokens=16_384,
        targets=16_384,
        sequences=64,
        loss=3.84,
        sublayers=places,
        class_tokens={"all": 16_384},
        routing=routing,
        routing_note="Weights of a softmax over block sums." if routing else "This mixer forms no weighted sums.",
        gates=gates,
        streams=streams,
        norms=tuple(Norms(sublayer=index, read=1.0, update=0.4, state=1.0 + index, gradient=0.01) for index in range(n)),
        attention=(),
        ablations=tuple(removed),
        effort=Effort(observe_seconds=3.1, gradient_seconds=2.0, ablation_seconds=21.4, passes=60),
    )


def _routing(sublayer: int, noise: np.random.Generator) -> Routing:
    sources = ("embedding", *(f"{index} {KINDS[index % 2]}" for index in range(sublayer)))
    raw = np.exp(1.6 * noise.standard_normal(len(sources)) + np.linspace(0, 1.5, len(sources)))
    share = tuple(float(value) for value in raw / raw.sum())
    favourite = sources[int(np.argmax(share))]
    every = ClassRouting(weight=share, entropy=-sum(part * math.log(part) for part in share), favourite=favourite)
    return Routing(
        sublayer=sublayer,
        result="read",
        part="",
        role="read",
        sources=sources,
        share=share,
        deviation=(0.1,) * len(sources),
        classes={"all": every},
    )


def _gates(sublayer: int, noise: np.random.Generator) -> Gates:
    parts = [float(part) for part in noise.dirichlet([1.0, 2.0, 3.0, 1.0])]
    return Gates(
        sublayer=sublayer,
        mean=0.9,
        near_0=parts[0],
        between=parts[1],
        near_1=parts[2],
        above_1=parts[3],
        before=1.2,
        after=0.4,
    )


def _ablation(what: str, sublayer: int, target: str, by: str, noise: np.random.Generator, choice: str = "") -> Ablation:
    change = float(0.3 * abs(noise.standard_normal()) + (1.1 if sublayer == 0 else 0.05))
    return Ablation.from_data(
        {
            "what": what,
            "sublayer": sublayer,
            "target": target,
            "replacement": by,
            "choice": choice,
            "change_norm": 3.2,
            "loss_change": change,
            "standard_error": 0.02,
            "control_loss_change": 0.15 * change,
            "control_standard_error": 0.01,
        }
    )
