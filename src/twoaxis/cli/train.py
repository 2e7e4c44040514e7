"""`twoaxis train RECIPE`: one training run in a folder of its own."""

from pathlib import Path
from typing import Annotated, Any

import typer

from twoaxis.cli.output import Json, is_first_process, name_of, print_json, say
from twoaxis.display.tables import print_table


def train(
    recipe: Annotated[Path, typer.Argument(help="A recipe in TOML or JSON.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Changes to the recipe as key=value, such as model.depth.kind=deep_delta.")
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option(
            "--run",
            "--folder",
            help="The folder of the run; by default that of a config.json in a run folder, else runs/ and the recipe's name.",
        ),
    ] = None,
    track: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TRACKER", help="Also send the numbers to a tracker: tensorboard, wandb or trackio; may be repeated."
        ),
    ] = None,
    as_json: Json = False,
) -> int:
    """Train a model, or resume an earlier run in the same folder.

    The run may be stopped or killed at any moment: the same command resumes it, with bit-identical losses. A recipe is
    a table with `model`, `data`, `optimizer`, `schedule`, `batch_size`, `steps` and more; every key has a default but
    model.d_model and model.n_layers.

    A run whose newest checkpoint is damaged reports it and resumes from the one before, with the same losses. With more `steps`
    and nothing else changed, a run continues, finished or not, if its schedule gives past steps the same learning rates in the
    longer run: `constant` always, `wsd` before its decay, both with warmup_steps given; `cosine` depends on the length at every
    step and is refused. A new run then begins with the weights and a schedule of its own: in Python, with `load_trained` and
    `save_trained` of twoaxis.train, `save_trained("NEW", old.model, old.tokenizer, {"steps": 500, "data": {...}})` after
    `old = load_trained("RUN")`; then `twoaxis train NEW/config.json --run NEW`.

    metrics.jsonl in the folder always has every step. A tracker shows the same numbers elsewhere and never changes them:
    tensorboard in the folder of the run, trackio in a database on this machine, wandb as its own settings say, with
    WANDB_MODE=offline on this machine. Each is an extra, such as twoaxis[wandb], and takes options as an inline table:
    --track '{kind="wandb", project="depth"}'.

    On several processes: torchrun --nproc-per-node 2 -m twoaxis train RECIPE parallel.shard=2 --folder RUN. The folder must be
    one that all processes see; torchrun takes --run for an option of its own.

    Example: twoaxis train examples/tiny.toml model.depth=deep_delta steps=50 --run runs/delta
    """
    from twoaxis.core.config import parse_value
    from twoaxis.train import console_progress, read_recipe
    from twoaxis.train import train as run_training
    from twoaxis.train.trained import default_folder, new_weights

    config = read_recipe(recipe, overrides or [])
    folder = run or default_folder(recipe, config)
    if (said := new_weights(recipe, folder)) and is_first_process():
        say(said)
    result = run_training(config, folder, console_progress(), trackers=[parse_value(one) for one in track or []])
    if is_first_process():
        _print(name_of(folder), result.to_data(), as_json)
    return 1 if result.status == "diverged" else 130 if result.status == "interrupted" else 0


def _print(run: str, result: dict[str, Any], as_json: bool) -> None:
    from twoaxis.display.numbers import decimal, plain

    if as_json:
        print_json({"run": run, **result})
    else:
        print_table(
            run, ("result", "value"), [(key, plain(value, decimal)) for key, value in result.items() if value is not None]
        )
