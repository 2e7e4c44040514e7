"""Canon layers: time on an H100 and parameters."""

from dataclasses import replace

from planner.published.row import Published, Row
from planner.published.runs import PLAIN, Data, numbers, one, params, preset, repeated
from twoaxis.model import DecoderConfig
from twoaxis.planner.formulas.training_step import stage_seconds
from twoaxis.planner.methods import methods
from twoaxis.planner.model.shape import ModelShape

BATCH, TOKENS = 8, 4096
N_LAYERS = 24
TIMES = {"Canon ABCD": (1.124, 1.141, 1.208), "Canon AC": (1.058, 1.058, 1.07)}
"""Forward, backward and generation over those of the plain model."""


def llama() -> ModelShape:
    """A Llama of 1.3 billion parameters; its vocabulary and feed-forward are assumed."""
    blocks = [[{"kind": "attention", "n_heads": 16}, {"kind": "swiglu", "d_ff": 5504}]]
    data = {
        "vocab_size": 32000,
        "d_model": 2048,
        "n_layers": 24,
        "max_seq_len": TOKENS,
        "tie_embeddings": False,
        "blocks": blocks,
    }
    return ModelShape.of_decoder(DecoderConfig.from_data(data), "llama-1.3b")


def canon() -> Published:
    """The predictions and what explains their differences."""
    return Published(
        method="Canon layers",
        source="arXiv:2512.17351, overheads of the 1.3B Llama on H100, and parameters",
        setting=f"One H100, as published. Model, batch and engine are not in our notes on the paper. Assumed: 24 layers, d = "
        f"2048, "
        f"d_ff = 5504; {BATCH} sequences of {TOKENS} in training, one in generation behind {TOKENS} tokens, compiled.",
        rows=(*_seconds(), *_params()),
        remarks=(_traffic(), _launches()),
        contradicted=_contradicted(),
    )


def _with(name: str, model: ModelShape) -> Data:
    method = next(method for method in methods() if method.name == name)
    return _deep(method.apply(model))


def _deep(model: ModelShape) -> Data:
    """All blocks are alike."""
    return repeated(numbers(replace(model, blocks=model.blocks[:2]), PLAIN), model.n_layers)


def _times(model: Data) -> tuple[float, float, float]:
    setting = one("h100", BATCH, TOKENS)
    seconds = stage_seconds(model, setting.run, setting.rates, setting.links["tensor"])
    token = setting.generation_step(model, 1, TOKENS)["seconds"]
    return seconds["forward"][0], seconds["backward"][0], token


def _seconds() -> list[Row]:
    rows, plain = [], _times(_deep(llama()))
    for name, published in TIMES.items():
        found = _times(_with(name, llama()))
        why = ("I", "I", "J")
        for what, told, ours, base, remark in zip(
            ("forward", "backward", "generation"), published, found, plain, why, strict=True
        ):
            rows.append(Row(f"{name}: {what} time", told, ours / base, why=remark))
    return rows


def _params() -> list[Row]:
    model = preset("gpt-124m")
    plain = params(_deep(model))
    added = 100 * (params(_with("Canon ABCD", model)) / plain - 1)
    return [Row("GPT-2 small, Canon ABCD: parameters added", 0.45, added, "percent", bound=True, digits=2)]


def _traffic() -> str:
    """What the convolutions move at least, and when the sum with the input passes over memory on its own."""
    model = llama()
    plain = _times(_deep(model))[0]
    bandwidth = one("h100", BATCH, TOKENS).rates["bytes_per_second"]
    told = []
    for name, channels in (("ABCD", 5 * model.d_model + 2 * 5504), ("AC", 2 * model.d_model)):
        once = model.n_layers * BATCH * TOKENS * channels * 2 / bandwidth / plain
        told.append(f"{name} {200 * once:.1f} % and {500 * once:.1f} %")
    return (
        "**I.** Of the plain forward pass, convolutions that read and write their channels once take, and convolutions that "
        "are followed "
        f"by a sum with their input in a kernel of its own (5 passes in place of 2): {'; '.join(told)}. ABCD as published is "
        f"the first "
        "and AC the second; why AC costs so much of what ABCD does is unexplained."
    )


def _launches() -> str:
    model, found = llama(), []
    token = _times(_deep(model))[2]
    for name, (_, _, published) in TIMES.items():
        found.append(f"{name} {1e6 * token * (published - 1) / model.n_layers:.1f} us")
    launch = one("h100", 1, 1).rates["launch_seconds"] * 1e6
    return (
        f"**J.** On the predicted {1e3 * token:.2f} ms of a plain token, the published overheads are {', '.join(found)} per "
        f"block. The "
        f"planner counts one launch of {launch:.0f} us for each place, four and two. With one for each of q, k, v, gate and up "
        f"they are seven "
        f"and two, {7 * launch:.0f} and {2 * launch:.0f} us."
    )


def _contradicted() -> tuple[str, ...]:
    model = llama()
    plain, changed = params(_deep(model)), params(_with("Canon ABCD", model))
    return (
        f"Canon layers are said to add 0.0063 % to a Llama of 1.3B. By the paper's own definition, kernels of 4 tokens at A, "
        f"B, C and D, "
        f"they add {changed - plain:,} to {plain:,}, {100 * (changed / plain - 1):.2f} %.",
    )
