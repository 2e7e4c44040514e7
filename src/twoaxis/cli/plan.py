"""`twoaxis plan`: the costs of a study, or of a model on many devices; nothing is trained."""

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from twoaxis.cli import plan_options as option
from twoaxis.cli.output import Json, print_json
from twoaxis.core.errors import ConfigError, problem
from twoaxis.display.numbers import seconds_text as _seconds
from twoaxis.display.tables import print_item, print_table

if TYPE_CHECKING:
    from twoaxis.planner.hardware import Device
    from twoaxis.study.planning.study_plan import StudyPlan


CEILINGS = ("operation", "measured", "fitted", "fitted/measured")
HELD_OUT = ("computation, not fitted", "operators", "predicted", "measured", "predicted/measured", "bound by")


def plan_calibrate(as_json: bool, out: Path | None = None) -> int:
    """Measures this machine and prints its rates and residual errors.

    Args:
        as_json: whether to print JSON.
        out: a file for the device, which `--hardware` accepts.

    Raises:
        ConfigError: another suffix, or an existing file.
    """
    from twoaxis.planner.hardware.calibrate import LIMIT_SECONDS, calibrate, write_device

    # Before the measurement, which takes about 20 s.
    if out is not None and out.suffix != ".toml":
        raise ConfigError(problem("out", str(out), "a file that ends in .toml", f"write to {out.with_suffix('.toml')}"))
    if out is not None and out.exists():
        raise ConfigError(problem("out", str(out), "a new file", "choose another name, or remove this one"))
    print(f"measuring this machine for about {LIMIT_SECONDS:.0f} s", file=sys.stderr)
    found = calibrate()
    if out is not None:
        write_device(found.device, out)
        print(f"wrote {out}", file=sys.stderr)
    if as_json:
        print_json(found.to_data())
        return 0
    _print_device(found.device)
    print()
    rows = [
        (row.name, _seconds(row.measured_seconds), _seconds(row.fitted_seconds), f"{row.ratio:.2f}") for row in found.ceilings
    ]
    print_table("Ceilings", CEILINGS, rows, CEILINGS[1:])
    print()
    held_out = [
        (p.name, p.operators, _seconds(p.predicted_seconds), _seconds(p.measured_seconds), f"{p.ratio:.2f}", p.bound)
        for p in found.predictions
    ]
    print_table("Residual errors", HELD_OUT, held_out, HELD_OUT[1:-1])
    error = found.median_absolute_log_error
    if not math.isnan(error):
        print(f"\nthe median prediction is off by a factor of {math.exp(error):.2f}")
    for name in found.left_out:
        print(f"left out, for lack of time: {name}")
    if found.disturbed:
        print_item(
            "runs of the same computation differed: another process used this machine; measure again when it is idle", ""
        )
    if out is None:
        print("`--out FILE.toml` keeps the device for --hardware")
    return 0


def _print_device(device: "Device") -> None:
    rows = [(path, f"{figure.value:.4g}") for path, figure in device.figures().items()]
    print_table(f"{device.name}: {device.description}", ("figure", "value"), rows, ("value",))


def plan_of_study(study_file: Path, as_json: bool, overrides: Sequence[str] = (), measure: bool = True) -> int:
    """Plans a study and prints it.

    Args:
        study_file: in TOML or JSON.
        as_json: whether to print JSON.
        overrides: changes to it.
        measure: whether a few steps of every arm are measured.
    """
    import tempfile

    from twoaxis.study import read_study
    from twoaxis.study.planning import plan_study
    from twoaxis.study.running import measured_plan
    from twoaxis.study.running.study_progress import console_study_progress

    config = read_study(study_file, overrides)
    if not measure:
        return print_plan(plan_study(config), as_json)
    with tempfile.TemporaryDirectory() as folder:
        return print_plan(measured_plan(config, Path(folder), console_study_progress()), as_json)


def print_plan(planned: "StudyPlan", as_json: bool) -> int:
    """Prints the arms of a plan, and its notes."""
    from twoaxis.display import numbers as words
    from twoaxis.study.report.text_tables import PLAN_COLUMNS, plan_rows, plan_title

    if as_json:
        print_json({"title": plan_title(planned), **planned.to_data()})
        return 0
    print_table(plan_title(planned), PLAN_COLUMNS, plan_rows(planned), numbers=PLAN_COLUMNS[2:-1])
    for arm in planned.arms:
        if arm.why and arm.role in ("treatment", "companion"):
            print_item(f"{arm.name}: {arm.why}", "")
    for note in planned.notes:
        print_item(f"left out: {note}", "")
    if planned.timing is None:
        measured = "are measured by `twoaxis plan`, and by `twoaxis study` before its first run"
        print_item(f"hours and memory ({words.MISSING}) {measured}", "")
    return 0


def plan(
    source: option.Source = None,
    overrides: option.Overrides = None,
    measure: option.Measure = None,
    hardware: option.Hardware = None,
    gpus: option.Gpus = None,
    goal: option.GoalOption = None,
    context: option.Context = None,
    batch: option.Batch = None,
    prompts: option.Prompts = None,
    budget_memory: option.BudgetMemory = None,
    budget_latency: option.BudgetLatency = None,
    tensor: option.Tensor = None,
    pipeline: option.Pipeline = None,
    data: option.Replicas = None,
    virtual: option.Virtual = None,
    microbatches: option.Microbatches = None,
    sequence: option.Sequence = None,
    schedule: option.Schedule = None,
    recompute: option.RecomputeOption = None,
    sharding: option.ShardingOption = None,
    forwarding: option.ForwardingOption = None,
    engine: option.EngineOption = None,
    precision: option.PrecisionOption = None,
    optimizer: option.OptimizerOption = None,
    html: option.Html = None,
    calibrate: option.Calibrate = False,
    out: option.Out = None,
    as_json: Json = False,
) -> int:
    """Plan a study (costs of every arm) or a model on many devices (costs of every method on either axis).

    For a study, a few steps of every arm are measured, in turns; `--count` leaves that out. For a model nothing is measured:
    the arrangement of devices with the shortest training step is searched, and every method is compared there.
    `--calibrate` measures this machine as a device.

    Example: twoaxis plan examples/models/llama-3-8b.json --hardware h100 --gpus 64 --goal shortcut
    """
    given = locals()
    if calibrate:
        if source is not None:
            raise ConfigError(f"FILE={source!r}: a calibration measures this machine and plans nothing; leave FILE out")
        return plan_calibrate(as_json, **option.belonging("a calibration", given))
    if source is None:
        raise ConfigError("FILE is missing: name a study, a model or a preset; or measure this machine with --calibrate")
    if _is_study(source):
        return plan_of_study(Path(source), as_json, **option.belonging("a study", given))
    from twoaxis.cli.plan_model import plan_of_model

    return plan_of_model(source, as_json, **option.belonging("a model", given))


def _is_study(source: str) -> bool:
    """Whether a file holds a study, which names its arms; all other files are read as models."""
    from twoaxis.core.config import read_config_file

    path = Path(source)
    return path.is_file() and not {"arms", "question"}.isdisjoint(read_config_file(path, "study or model"))
