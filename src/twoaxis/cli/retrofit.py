"""`twoaxis retrofit SRC`: adds mixers to a trained model."""

from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import typer

from twoaxis.cli.list import complete_depth
from twoaxis.cli.models import SOURCES, Step, model_to_run
from twoaxis.cli.output import Json, name_of, print_json
from twoaxis.core.errors import ConfigError, DataError, problem
from twoaxis.core.text import read_text
from twoaxis.display.tables import print_table

if TYPE_CHECKING:
    from torch import Tensor

    from twoaxis.data import Tokenizer
    from twoaxis.model import Decoder, DecoderConfig

WINDOW = 256
"""Tokens that are compared at once."""

TOKENS = f"Tokens to compare, in rows of at most {WINDOW}; the last row is filled up with random tokens, or left out of a text."

Depth = Annotated[
    str | None,
    typer.Option(
        metavar="MIXER",
        help="The depth mixer: a kind or an inline table; residual adds none.",
        autocompletion=complete_depth,
    ),
]


def retrofit(
    source: Annotated[Path, typer.Argument(help=SOURCES)],
    out: Annotated[Path, typer.Option(help="The run folder to write, new or empty.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="The recipe to train by, as key=value, such as steps=200 optimizer.lr=1e-4.")
    ] = None,
    depth: Depth = None,
    sequence: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MIXER",
            help="short_swa, short_conv, ngram_embedding, kv_shift, a local mixer, or an inline table; may be repeated.",
        ),
    ] = None,
    text: Annotated[Path | None, typer.Option(help="Text to compare logits on; random tokens without one.")] = None,
    tokens: Annotated[int, typer.Option(min=1, help=TOKENS)] = 1024,
    bound: Annotated[float, typer.Option(min=0.0, help="The largest difference of logits that is accepted.")] = 1e-3,
    allow_difference: Annotated[bool, typer.Option("--allow-difference", help="Write the run at any difference.")] = False,
    new_lr_scale: Annotated[float, typer.Option(min=0.0, help="Factor on the learning rate of new parameters.")] = 1.0,
    freeze_base: Annotated[bool, typer.Option("--freeze-base", help="Train new parameters only.")] = False,
    seed: Annotated[int, typer.Option(min=0, help="Seed of new parameters and of random tokens.")] = 0,
    step: Step = None,
    as_json: Json = False,
) -> int:
    """Add mixers to a trained Llama, Mistral, Qwen2, Qwen3 or SmolLM, or to a model of ours, without changing what it computes.

    A method starts as the given model if its mathematics allows; otherwise it is blended in, and the reason is printed: over
    the first half of the steps, as the recipe's own `anneal` says, or learned from 0 with anneal=[]. The largest difference
    between the logits of both models is measured before anything is written: above the bound, nothing is, and the exit status
    is 1.

    The result is a run folder: `twoaxis generate` uses it as it is, and `twoaxis train OUT/config.json --run OUT` goes on.

    Example: twoaxis retrofit SmolLM2-135M --depth attention_residuals --out runs/smol steps=200 optimizer.lr=1e-4
    """
    from twoaxis.checkpoints.published_folder import keep_source_files
    from twoaxis.checkpoints.retrofit import target_config
    from twoaxis.core.config import apply_overrides, parse_value
    from twoaxis.display.numbers import plain

    if depth is None and not sequence:
        raise ConfigError("nothing to add; name a mixer with --depth or --sequence")
    loaded = model_to_run(source, step)
    model, tokenizer = loaded.model, loaded.tokenizer
    mixers = [parse_value(one) for one in sequence or []]
    target = target_config(model.config, None if depth is None else parse_value(depth), mixers)
    recipe = apply_overrides({"optimizer": {"lr": 1e-4}}, overrides or [])
    rows = _rows(text, tokens, tokenizer, model, seed)
    training = Training(recipe, new_lr_scale, "frozen" if freeze_base else "trained", keep_source_files(source))
    report = _retrofit(model, tokenizer, target, rows, out, inf if allow_difference else bound, training, seed)
    if as_json:
        print_json(report)
    else:
        said = [(key, plain(value)) for key, value in report.items() if key != "blend" or value]
        print_table(name_of(source), ("retrofit", "value"), said)
        if report["run"] is None:
            print(f"nothing was written: the logits do not agree within {bound:g}; --allow-difference writes the run anyway")
    return 0 if report["run"] else 1


class Training(NamedTuple):
    """Training of the new model.

    Attributes:
        recipe: options of the user.
        new_lr_scale: factor on the learning rate of new parameters.
        base: whether the parameters of the given model are trained.
        write_more: writes further files into the run.
    """

    recipe: dict[str, Any]
    new_lr_scale: float
    base: Literal["trained", "frozen"]
    write_more: Callable[[Path], None]


def _retrofit(
    model: "Decoder",
    tokenizer: "Tokenizer",
    target: "DecoderConfig",
    rows: "Tensor",
    out: Path,
    bound: float,
    training: Training,
    seed: int,
) -> dict[str, Any]:
    """Measures, and writes the run when the difference is within the bound."""
    from twoaxis.checkpoints.retrofit import convert, largest_difference, start_of, training_recipe
    from twoaxis.train import console_progress, new_run, save_trained

    recipe, (start, reason) = training.recipe, start_of(target)
    # Before the measurement, which takes long.
    steps = new_run(out, target, tokenizer, recipe).steps
    result = convert(model, target, seed)
    blend_steps, anneal = max(1, steps // 2), recipe.get("anneal")
    added = training_recipe(result, training.new_lr_scale, training.base, blend_steps, anneal)
    groups = [*added["optimizer"]["groups"], *recipe["optimizer"].get("groups", [])]
    recipe = {**added, **recipe, "optimizer": {**recipe["optimizer"], "groups": groups}}
    if start == "blended" and anneal is None:
        console_progress().note(
            f"note: the blend moves from 0 to 1 in {blend_steps} steps, which raises the loss if they are few "
            "(docs/retrofit.md); use more steps, or anneal=[] to learn the blend from 0"
        )
    progress = console_progress()
    progress.note(f"comparing the logits of both models on {rows.numel():,} tokens")
    try:
        difference, agreement = largest_difference(model, result.model, rows, progress.preparing)
    finally:
        progress.stop()
    # NaN is not accepted either.
    written = save_trained(out, result.model, tokenizer, recipe, training.write_more) if difference <= bound else None
    return {
        "start": start,
        "reason": reason,
        "blend": _blend(anneal, blend_steps) if start == "blended" else None,
        "largest_logit_difference": difference,
        "same_next_token": agreement,
        "new_parameters": result.new_parameters,
        "run": None if written is None else name_of(written),
    }


def _blend(anneal: list[Any] | None, steps: int) -> str:
    """The schedule of the blend in words."""
    if anneal is None:
        return f"from 0 to 1 over {steps} steps"
    return "as the recipe says" if anneal else "learned from 0"


def _rows(text: Path | None, tokens: int, tokenizer: "Tokenizer", model: "Decoder", seed: int) -> "Tensor":
    """Rows of tokens, each short enough to compare at once."""
    import torch

    width = min(WINDOW, tokens, model.config.max_seq_len)
    if text is None:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(model.config.vocab_size, (-(-tokens // width), width), generator=generator)
    words = read_text(text, f"text {text}", "name a text in UTF-8")
    if not words:
        raise DataError(problem("text", str(text), "at least one token", "name a longer text"))
    ids = tokenizer.prompt(words)[:tokens]
    width = min(width, len(ids))
    return torch.tensor(ids[: len(ids) // width * width]).unflatten(0, (-1, width))
