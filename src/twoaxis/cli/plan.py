"""`twoaxis plan`: what a study, or a model on many devices, will cost; nothing is trained."""

from pathlib import Path

from twoaxis.cli import plan_options as option
from twoaxis.cli.output import Json
from twoaxis.core.errors import ConfigError


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
    html: option.Html = None,
    calibrate: option.Calibrate = False,
    out: option.Out = None,
    as_json: Json = False,
) -> int:
    """Plan a study (what every arm costs) or a model on many devices (what every method on either axis costs).

    For a study, a few steps of every arm are measured, in turns; `--count` leaves that out. For a model nothing is measured:
    the arrangement of devices with the shortest training step is searched, and every method is compared there.
    `--calibrate` measures this machine as a device.

    Example: twoaxis plan examples/models/llama-3-8b.json --hardware h100 --gpus 64 --goal shortcut
    """
    given = locals()
    if calibrate:
        from twoaxis.cli.plan_calibrate import plan_calibrate

        if source is not None:
            raise ConfigError(f"FILE={source!r}: a calibration measures this machine and plans nothing; leave FILE out")
        return plan_calibrate(as_json, **option.belonging("a calibration", given))
    if source is None:
        raise ConfigError("FILE is missing: name a study, a model or a preset; or measure this machine with --calibrate")
    if _is_study(source):
        from twoaxis.cli.plan_study import plan_of_study

        return plan_of_study(Path(source), as_json, **option.belonging("a study", given))
    from twoaxis.cli.plan_model import plan_of_model

    return plan_of_model(source, as_json, **option.belonging("a model", given))


def _is_study(source: str) -> bool:
    """Whether a file holds a study, which names its arms; everything else is read as a model."""
    from twoaxis.core.config_file import read_config_file

    path = Path(source)
    return path.is_file() and not {"arms", "question"}.isdisjoint(read_config_file(path, "study or model"))
