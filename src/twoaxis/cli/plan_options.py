"""The options of `twoaxis plan`, and whether they belong to a study, to a model or to a calibration."""

from pathlib import Path
from typing import Annotated, Any

import typer

from twoaxis.core.errors import ConfigError

Source = Annotated[
    str | None, typer.Argument(metavar="[FILE]", help="A study, a model (TOML, config.json, folder) or a preset.")
]
Overrides = Annotated[list[str] | None, typer.Argument(help="Study: changes as key=value.")]
Measure = Annotated[
    bool | None,
    typer.Option("--measure/--count", help="Study: measure a few steps of every arm here (default), or count only."),
]


Hardware = Annotated[str | None, typer.Option(help="Model: a device by its name, or a file from --calibrate. [default: h100]")]
Gpus = Annotated[int | None, typer.Option(help="Model: devices in all. [default: 8]")]
GoalOption = Annotated[str | None, typer.Option(help="Model: shortcut, local-mixing or both adds the paper's recommendation.")]
Context = Annotated[
    int | None,
    typer.Option(
        help="Model: tokens of a sequence, of a prompt, and before a generated token. [default: the model's, at most 8192]"
    ),
]
Batch = Annotated[int | None, typer.Option(help="Model: sequences of a training step. [default: about 4 Mi tokens]")]
Prompts = Annotated[int | None, typer.Option(help="Model: sequences that generate at once. [default: 8]")]
BudgetMemory = Annotated[str | None, typer.Option(help="Model: limit of one GPU in training, such as 70GB or 64GiB.")]
BudgetLatency = Annotated[str | None, typer.Option(help="Model: limit of one generated token, such as 20ms.")]
Tensor = Annotated[int | None, typer.Option(help="Model: tensor-parallel ranks. [default: searched]")]
Pipeline = Annotated[int | None, typer.Option(help="Model: pipeline ranks. [default: searched]")]
Replicas = Annotated[int | None, typer.Option(help="Model: data-parallel replicas. [default: searched]")]
Virtual = Annotated[int | None, typer.Option(help="Model: stages on each pipeline rank. [default: 1]")]
Microbatches = Annotated[int | None, typer.Option(help="Model: microbatches of a step on one replica. [default: searched]")]
Sequence = Annotated[
    str | None, typer.Option(help="Model: none, or tensor: tokens are shared among tensor ranks. [default: tensor]")
]
Schedule = Annotated[str | None, typer.Option(help="Model: 1f1b or gpipe. [default: 1f1b]")]
RecomputeOption = Annotated[str | None, typer.Option(help="Model: off or block. [default: searched]")]
ShardingOption = Annotated[str | None, typer.Option(help="Model: none, optimizer or weights. [default: searched]")]
ForwardingOption = Annotated[
    str | None, typer.Option(help="Model: what stages send: naive, cached or cached_own. [default: naive]")
]
EngineOption = Annotated[
    str | None,
    typer.Option(help="Model: of depth operations: fused, or eager, whose kernels take minutes to count. [default: fused]"),
]
PrecisionOption = Annotated[str | None, typer.Option(help="Model: bf16 or fp32. [default: bf16 where the device has it]")]
OptimizerOption = Annotated[
    str | None, typer.Option(help="Model: adamw, or muon, whose matrices have one moment. [default: the recipe's, or adamw]")
]
Html = Annotated[Path | None, typer.Option(help="Model: write a page that recomputes the plan in the browser.")]
Calibrate = Annotated[bool, typer.Option("--calibrate", help="Measure this machine as a device, instead of a plan.")]
Out = Annotated[Path | None, typer.Option(help="Calibration: write the device into this TOML file.")]

OF_STUDY = {"overrides": "key=value", "measure": "--measure/--count"}
OF_CALIBRATION = {"out": "--out"}
SHARED = ("source", "calibrate", "as_json")


def belonging(what: str, given: dict[str, Any]) -> dict[str, Any]:
    """Returns the given options, which must belong to "a study", "a model" or "a calibration".

    Args:
        what: one of these three.
        given: every option by the name of its parameter.

    Raises:
        ConfigError: an option that belongs to another of them.
    """
    found: dict[str, Any] = {}
    for name, value in given.items():
        if name in SHARED or value is None or value == []:
            continue
        owner = "a study" if name in OF_STUDY else "a calibration" if name in OF_CALIBRATION else "a model"
        if owner != what:
            shown = (OF_STUDY | OF_CALIBRATION).get(name, f"--{name.replace('_', '-')}")
            raise ConfigError(f"{shown}: belongs to {owner}, and this is {what}; leave it out")
        found[name] = value
    return found
