"""The text of the scale page, with every number taken from the data."""

from collections.abc import Mapping, Sequence
from typing import Any

from planner.scale.break_even import crossing
from planner.scale.cases import CASES, CHUNK_TOKENS, CONTEXTS, SHAPES
from planner.scale.compute import CONTROL, LIMIT
from planner.scale.findings import (
    generation_breaks,
    memory_breaks,
    pick,
    prefill_breaks,
    training_breaks,
    treated,
    under_limit,
)

Row = Mapping[str, Any]
SHORT, LONG = min(CONTEXTS), max(CONTEXTS)
SMALL, LARGE = next(iter(SHAPES)), list(SHAPES)[-1]
BLOCKS = "AttnRes blocks, two-phase"


def scale_page(data: Mapping[str, Any]) -> str:
    """The page in Markdown.

    Args:
        data: what `scale_data` makes.
    """
    parts = (
        _findings(data),
        _breaks(data),
        _forwarding(data),
        _engines(data),
        _break_even(data),
        _axes(data),
        _published(data),
    )
    return "\n".join([*(line for part in parts for line in part), *_method(), *_limits()])


def _findings(data: Mapping[str, Any]) -> list[str]:
    rows = data["rows"]
    training = under_limit(rows, lambda row: row["training"]["overhead"])
    fitting = [name for name in training if not memory_breaks(rows, name)]
    both = [name for name in fitting if not generation_breaks(rows, name)]
    full, blocks = pick(rows, "AttnRes full", LARGE, SHORT), pick(rows, BLOCKS, LARGE, SHORT)
    at_1m = [pick(rows, "AttnRes full", shape, LONG)["training"] for shape in SHAPES]
    needed = (f"{each['memory_bytes'] / 1e9:.0f} GB" for each in at_1m)
    eager, fused = pick(data["eager"], "mHC", SMALL, SHORT)["training"], pick(rows, "mHC", SMALL, SHORT)["training"]
    return [
        "# Scale on paper: 7B, 70B and a 1T mixture of experts at 8k, 128k and 1M tokens\n",
        "What each way of mixing along depth or locally along positions adds to the residual stream in training, prefill and "
        "generation, by the planner's formulas. Nothing here was run. Written by `python docs/build.py scale`; all numbers: "
        "[scale.json](scale.json).\n",
        "## What comes out\n",
        f"* **Under 5 % of a training step in every case, and in memory: {'; '.join(fitting)}.** Of these, a step of "
        f"generation too stays under 5 % with {_all_or(both, fitting)}.",
        "* **Width decides, then depth.** A depth operation moves a multiple of D numbers per token, a sublayer multiplies by "
        "matrices of D² numbers: the same method costs "
        + _series(rows, "mHC", SHORT)
        + " with mHC at 8k tokens and D = 4096, 8192, 7168. What reads all sources pays for depth as well: "
        + _series(rows, "AttnRes full", SHORT)
        + " with full AttnRes.",
        "* **Time breaks at short contexts, memory at long ones.** Attention grows with the square of the length and hides any "
        f"depth operation: full AttnRes at 1M tokens adds {_list(_percent(each['overhead']) for each in at_1m)}, but it needs "
        f"{_list(needed)} on the fullest rank, where 80 GB are there.",
        "* **What breaks depends on the pipeline.** With 4 ranks (7B) the depth operation's HBM traffic is the most of the "
        "overhead, then the time that ranks wait for the last stages, which read most sources; with 16 ranks (1T) it is the "
        f"boundary: {_percent(full['training']['exposed'])} of {_percent(full['training']['overhead'])} with full AttnRes.",
        f"* **Block compression is what saves histories.** Eight blocks send {_states(data, blocks, 'cached')} hidden states "
        f"over the worst boundary in place of {_states(data, full, 'cached')}, and take the step from "
        f"{_percent(full['training']['overhead'])} to {_percent(blocks['training']['overhead'])} more (1T, 8k).",
        "* **Generation hardly notices a depth mixer without matrices of its own**, unless many sequences are generated at "
        "once by many tensor-parallel ranks, each of which runs the whole depth operation: full AttnRes costs "
        + _list(_percent(pick(rows, "AttnRes full", shape, SHORT)["serving"]["generation"]) for shape in SHAPES)
        + " (8, 32 and 64 sequences on 1, 8 and 8 ranks).",
        "* **A sparse read is not a small state.** DenseFormer 4x5 sums after every fifth block, and then one output in "
        "four; still, what is behind a boundary may be read later: at 1T it sends "
        f"{_states(data, pick(rows, 'DenseFormer 4x5', LARGE, SHORT), 'cached')} hidden states.",
        "* **All of this is with fused kernels.** With one kernel for each operation of PyTorch mHC takes "
        f"{_percent(eager['overhead'])} more at 7B and 8k in place of {_percent(fused['overhead'])}.\n",
        _image("training", "Percent that a training step takes longer, by method and case"),
        _image("parts", "What the overhead in training is made of, for methods over 5 % at 8k"),
    ]


def _breaks(data: Mapping[str, Any]) -> list[str]:
    rows = data["rows"]
    names = list(dict.fromkeys(row["method"] for row in treated(rows)))
    table = [
        (
            name,
            training_breaks(rows, name),
            memory_breaks(rows, name),
            generation_breaks(rows, name),
            prefill_breaks(rows, name),
        )
        for name in names
    ]
    kept = [row for row in table if any(row[1:])]
    columns = ("method", "training over 5 %, by what", "training memory over 80 GB", "generation over 5 %", "prefill state")
    chunked = pick(rows, "AttnRes full", SMALL, LONG)["serving"]
    still = [name for name in names if "also in chunks" in prefill_breaks(rows, name)]
    local = pick(rows, "ShortSWA w=128", SMALL, SHORT)["training"]
    return [
        "## Where each breaks\n",
        "The resource named is the one that most of the overhead is spent on. Prefill state: where the depth state of one "
        "prompt, read in one, does not fit beside weights and the cache.\n",
        *_table(columns, kept),
        "Nowhere over 5 % and always in memory: " + ", ".join(row[0] for row in table if not any(row[1:])) + ".\n",
        f"Reading a prompt in chunks of {CHUNK_TOKENS // 1024}k tokens takes the prefill state away as a limit"
        f"{', except for ' + _list(still) if still else ''}: full "
        f"AttnRes at 7B and 1M holds {chunked['chunked_bytes'] / 1e9:.1f} GB on each rank then, not "
        f"{chunked['state_bytes'] / 1e9:.0f}. In training there is no such way out, since the backward pass needs every "
        "source: more ranks that share the sequence, or blocks.\n",
        "ShortSWA and ShortConv are counted as a sublayer put before each block, with its norm, its messages and (ShortSWA) "
        f"its parameters: {_percent(local['overhead'])} at 7B and 8k is what a model of more parameters costs. In a comparison "
        "at equal cost they are paid for by a narrower feed-forward. Inside sublayers that are there anyway (Canon, KV shift) "
        "local mixing is nearly free.\n",
        _image("generation", "Percent that a step of generation takes longer, by method and case"),
        _image("prefill", "Percent that a prefill takes longer, by method and case"),
    ]


def _forwarding(data: Mapping[str, Any]) -> list[str]:
    rows = data["rows"]
    shown = [row for row in treated(rows) if row["shape"] == LARGE and row["tokens"] == SHORT]
    shown += [row for row in treated(rows) if row["shape"] == "dense-70b" and row["tokens"] == SHORT]
    table = []
    for row in shown:
        ways = row["forwarding"]
        if ways["naive"]["boundary_bytes"] > ways["cached"]["boundary_bytes"]:
            sent = (_states(data, row, way) for way in ways)
            table.append((row["method"], SHAPES[row["shape"]], *sent, *(_percent(ways[way]["overhead"]) for way in ways)))
    columns = (
        "method, 8k tokens",
        "shape",
        "states: naive",
        "cached",
        "cached, own too",
        "step: naive",
        "cached",
        "cached, own too",
    )
    return [
        "## Forwarding a history\n",
        "Naive forwarding sends the whole state over every boundary. Caching (arXiv:2603.15031) keeps on a rank what it has "
        "received for its earlier virtual stages; the third way also keeps what it has made. Hidden states at the worst "
        "boundary, and what the step takes longer, with two virtual stages on a rank:\n",
        *_table(columns, table),
        "Caching about halves what the worst boundary carries with two virtual stages, and would do more with more of them; "
        "for eight blocks the difference is below one percent of a step. Keeping what a rank has made itself too saves "
        "little more.\n",
        _image(
            "boundaries", "Hidden states that a token sends over the worst boundary, by method, shape and way of forwarding"
        ),
        "Where the time goes, rank by rank: the last stages read most sources, so the others wait for them.\n",
        _image("timeline", "One training step of 7B with full AttnRes at 8k: what each rank computes, sends and waits for"),
    ]


def _engines(data: Mapping[str, Any]) -> list[str]:
    table = []
    for row in data["eager"]:
        if row["method"] == CONTROL:
            continue
        fused = pick(data["rows"], row["method"], row["shape"], row["tokens"])
        table.append(
            (
                row["method"],
                f"{SHAPES[row['shape']]}, {CONTEXTS[row['tokens']]}",
                _percent(fused["training"]["overhead"]),
                _percent(row["training"]["overhead"]),
                _percent(fused["serving"]["generation"]),
                _percent(row["serving"]["generation"]),
            )
        )
    columns = ("method", "case", "training, fused", "training, eager", "generation, fused", "generation, eager")
    return [
        "## Without fused kernels\n",
        "Eager: one kernel for each operation of PyTorch, each of which reads and writes memory, and 10 µs to start each; the "
        "residual stream it is held against runs so too. In training it is the traffic that grows, in generation the number of "
        "kernels, which a recorded graph would shorten.\n",
        *_table(columns, table),
    ]


def _break_even(data: Mapping[str, Any]) -> list[str]:
    deep, cut = data["by_layers"], data["by_stages"]
    first, last = min(row["layers"] for row in deep), max(row["layers"] for row in deep)
    most = max(row["virtual"] for row in cut)
    table = []
    for name in dict.fromkeys(row["method"] for row in deep):
        layers = crossing([(row["layers"], row["overhead"]) for row in deep if row["method"] == name])
        depth = f"not up to {last}" if layers is None else f"below {first}" if layers == first else f"{layers:.0f}"
        found = [name, depth]
        for way in ("naive", "cached"):
            points = [(row["virtual"], row["overhead"]) for row in cut if (row["method"], row["forwarding"]) == (name, way)]
            at = next((virtual for virtual, overhead in points if overhead > LIMIT), None)
            found.append(f"not up to {most}" if at is None else "from the first" if at == 1 else str(at))
            found.append(_percent(points[-1][1]))
        table.append(tuple(found))
    columns = (
        "history",
        "layers",
        "virtual stages, naive",
        f"at {most}, naive",
        "virtual stages, cached",
        f"at {most}, cached",
    )
    return [
        "## Break-even\n",
        "The number of layers at which a history crosses 5 % of a training step, for the 7B shape with other depths (D = 4096, "
        "8k tokens, 4 pipeline ranks with two virtual stages, cached); and the number of virtual stages on each rank at which "
        "it does with 32 layers.\n",
        *_table(columns, table),
        "Full histories grow with depth, and a wider model may be about as much deeper: twice the width, twice the layers. "
        "Blocks and windows do not grow. More virtual stages shorten the bubble, so cached histories get cheaper with them; "
        "naive forwarding turns that around.\n",
        _image("break-even", "Overhead of histories by the number of layers and by virtual stages"),
    ]


def _axes(data: Mapping[str, Any]) -> list[str]:
    table = [
        (
            row["operator"],
            f"{row['params'] / 1e6:,.1f} M",
            f"{row['flops'] / 1e6:,.0f} M",
            _bytes(row["traffic_bytes"]),
            _bytes(row["naive_bytes"]),
            _bytes(row["cached_bytes"]),
            _bytes(row["halo_bytes"]),
            _bytes(row["cache_bytes"]),
            _bytes(row["passing_bytes"]),
            _percent(row["training"]),
            _percent(row["generation"]),
        )
        for row in data["axes"]
    ]
    depth, sequence = data["axes"][1], data["axes"][2]
    columns = (
        "operator",
        "parameters",
        "FLOPs per token",
        "HBM per token",
        "worst boundary per token",
        "the same, cached",
        "at a cut of the sequence, once",
        "cache in generation",
        "state while a token passes",
        "training",
        "generation",
    )
    return [
        "## Operator duality is not systems symmetry\n",
        "The same window along depth and along positions, on the 7B shape at 8k tokens, as what each adds to the residual "
        "stream (one forward pass of the whole stack; training and generation in time):\n",
        *_table(columns, table),
        "With equal heads, windows and numbers of reads the two operators compute the same within "
        f"{abs(sequence['flops'] / depth['flops'] - 1):.1%} and move the same within "
        f"{abs(sequence['traffic_bytes'] / depth['traffic_bytes'] - 1):.1%}. The depth read has one set of matrices for all "
        f"depths, as a sequence read has one for all positions: {depth['params'] / 1e6:,.0f} M parameters in the model, where "
        f"a sequence read in each block comes to {sequence['params'] / 1e6:,.0f} M. Their state lies across different cuts. A "
        f"cut along depth, between pipeline stages, asks the depth read for {_bytes(depth['naive_bytes'])} more for every "
        "token and the sequence read for nothing; a cut along the sequence asks the sequence read for "
        f"{_bytes(sequence['halo_bytes'])} once, however long the context, and the depth read for nothing. In generation the "
        "sequence read keeps its window in the cache; the depth read keeps nothing once a token has passed. So the claim of "
        "arXiv:2603.16039, that operator duality is not systems symmetry, holds here in numbers: what is equal is arithmetic "
        "and HBM traffic, what is not is communication, and that is linear in the number of tokens on one axis only.\n",
        "The sequence reads take longer although they compute as much: each is a sublayer of its own, with its norm and its "
        "messages between tensor-parallel ranks, which also cut its matrices into narrower products. The depth reads' matrices "
        "are whole on every rank, which saves the messages and costs memory.\n",
    ]


def _published(data: Mapping[str, Any]) -> list[str]:
    rows = data["rows"]
    table = [
        (
            "AttnRes blocks, two-phase, training with a pipeline (arXiv:2603.15031)",
            "below 4 %",
            _series(rows, BLOCKS, SHORT) + " at 7B, 70B, 1T",
        ),
        (
            "AttnRes blocks, generation (the same)",
            "below 2 %",
            _list(_percent(pick(rows, BLOCKS, shape, SHORT)["serving"]["generation"]) for shape in SHAPES) + " at 7B, 70B, 1T",
        ),
        ("mHC, 4 streams, training of 27B (arXiv:2512.24880)", "6.7 %", _series(rows, "mHC", SHORT) + " at 7B, 70B, 1T"),
    ]
    return [
        "## Against published numbers\n",
        *_table(("what", "published", "here, 8k tokens"), table),
        "The published models are others (a 48B mixture of experts of D = 2304, a 27B one of D = 2560), so this is a check of "
        "magnitude; [published.md](published.md) predicts the published models themselves.\n",
    ]


def _method() -> list[str]:
    table = []
    for case in CASES:
        layout = case.layout
        table.append(
            (
                case.name,
                str(layout.gpus),
                f"{layout.tensor} x {layout.pipeline} x {layout.data // case.context} x {case.context}",
                f"{layout.microbatches} of {case.sequences}",
                case.recompute,
                f"{case.serving_ranks} {case.serving_device.upper()}, {case.serving_batch}",
            )
        )
    columns = ("case", "H100", "tensor x pipeline x data x context", "microbatches", "recomputed", "serving ranks, batch")
    return [
        "## How it was computed\n",
        "Seconds are roofline times of the planner, with the rates of `planner/hardware/devices`; a training step is the "
        "simulated interleaved 1F1B schedule with two virtual stages on a rank, transfers overlapped, mixed precision with "
        "Adam and optimizer states sharded over the replicas. A method's time is held against the residual stream in the same "
        "setting. Depth operations run as one kernel for each read and write.\n",
        *_table(columns, table),
        "* Tensor ranks share the tokens between matrices (sequence parallel). At 7B and 8k two are enough; from 128k on, and "
        "for larger shapes, all 8 GPUs of a host share a sequence.",
        "* Context ranks: layouts have no dimension that shares a sequence beyond one host, and at 1M tokens one is used in "
        "practice. Here data-parallel ranks do: each computes 1/c of the tokens and of the visible pairs, and holds 1/c of the "
        "activations. What they send each other for attention is left out of all methods alike.",
        "* Blocks are recomputed in the backward pass where their activations would not fit otherwise: at long contexts, and "
        "at 1T. Then only the states between blocks are kept, which is where a history takes most memory.",
        "* All shapes have a pipeline, since its boundaries are what is asked about; 7B would run on 64 GPUs without one, and "
        "then boundary bytes and uneven stages fall away.",
        "* Prefill is of one prompt, in one. Latent attention generates in its absorbed form. The 1T shape is served with "
        "weights in 8 bits, as it was published.",
        "* Parts of an overhead: depth operations and mixers bring along idle time in proportion; what a step waits beyond "
        "that is split into transfers (the step less one with free transfers) and uneven stages (the rest).\n",
    ]


def _limits() -> list[str]:
    return [
        "## What is not modelled\n",
        "* Expert parallelism: the tensor ranks cut every expert, so products of experts are narrow and all-to-all messages "
        "are missing. The 1T step at 8k is slower than a tuned one, which makes overheads there look smaller.",
        "* Overlap of tensor-parallel messages with products, contention of links, stragglers, load balance of experts.",
        "* Selective recomputation, offloading, and activations in 8 bits. Recomputation is all blocks or none.",
        "* Stages are cut by numbers of blocks; cuts that give later stages fewer blocks would even out what full histories "
        "cost there.",
        "* Local mixers of short reach are charged the messages of any sublayer, though with a few tokens of the neighbour "
        "they would need none.",
        "* Kernels reach the roofline. A fused kernel that does not exist yet is taken to exist.",
        "",
    ]


def _series(rows: Sequence[Row], method: str, tokens: int) -> str:
    return _list(_percent(pick(rows, method, shape, tokens)["training"]["overhead"]) for shape in SHAPES)


def _states(data: Mapping[str, Any], row: Row, way: str) -> str:
    return f"{row['forwarding'][way]['boundary_bytes'] / data['control_bytes'][row['shape']]:.0f}"


def _all_or(some: Sequence[str], everything: Sequence[str]) -> str:
    return "all of them" if list(some) == list(everything) else ", ".join(some)


def _list(words: Any) -> str:
    *most, last = list(words)
    return f"{', '.join(most)} and {last}" if most else last


def _percent(part: float) -> str:
    return f"{100 * part:.0f} %" if abs(part) >= 0.0995 else f"{100 * part + 0.0:.1f} %"


def _bytes(count: float) -> str:
    for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(count) >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f}"


def _image(name: str, words: str) -> str:
    return f"![{words}](scale-{name}.svg)\n"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|", *(f"| {' | '.join(row)} |" for row in rows), ""]
