"""`twoaxis study STUDY`: arms against a control, in pairs, with intervals."""

import shlex
from pathlib import Path
from typing import Annotated, Literal

import typer

from twoaxis.cli.output import Json
from twoaxis.cli.plan import print_plan
from twoaxis.cli.report import print_report
from twoaxis.core.errors import ConfigError, problem


def study(
    study_file: Annotated[Path, typer.Argument(metavar="STUDY", help="A study in TOML or JSON.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Changes to the study as key=value, such as replicates=3 or budget.steps=400.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The folder of the study; by default runs/ and the file's name.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Runs at once; they divide the cores.")] = 1,
    engine: Annotated[
        Literal["local", "ray"], typer.Option(help="Where runs are executed: here, or on a Ray cluster that shares the folder.")
    ] = "local",
    track: Annotated[list[str] | None, typer.Option(help="A tracker for every run, such as tensorboard; repeatable.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would run, measure nothing, and stop.")] = False,
    as_json: Json = False,
) -> int:
    """Run a study, print its table, and write its report.

    A study has a question, arms, a control, replicates and a budget fixed in advance; every run is a process of its own.
    It can be stopped at any moment: the same command keeps finished runs and resumes the others. A report is written for every
    outcome; "undecided" is a verdict, and states what would decide.

    Example: twoaxis study studies/first.toml replicates=3 --out runs/first
    """
    from twoaxis.study import read_study
    from twoaxis.study.planning import plan_study
    from twoaxis.study.report import write_report
    from twoaxis.study.running import run_study, train_command
    from twoaxis.study.running.engine import LocalEngine
    from twoaxis.study.running.study_progress import console_study_progress

    config = read_study(study_file, overrides or [])
    if dry_run:
        return print_plan(plan_study(config), as_json)
    folder = out or Path("runs") / study_file.stem
    trackers = [word for name in track or [] for word in ("--track", name)]
    words = [str(study_file), *(overrides or []), "--out", str(folder), "--jobs", str(jobs), "--engine", engine, *trackers]
    if engine == "ray":
        from twoaxis.study.running.ray_engine import RayEngine
        from twoaxis.study.running.ray_placement import gpus_for

        if config.processes > 1:
            raise ConfigError(problem("processes of a run", config.processes, "1 with --engine ray", "leave out base.parallel"))
        devices = (config.recipe(arm, config.replicates[0]).device for arm in config.arms)
        chosen = RayEngine(jobs, gpus_for(devices))
    else:
        chosen = LocalEngine(jobs, config.processes)
    run_study(
        config,
        folder,
        progress=console_study_progress(),
        engine=chosen,
        command=lambda recipe, run: [*train_command(recipe, run), *trackers],
        # With the jobs and the engine, since they divide the threads, on which last digits may depend.
        command_line=shlex.join(["twoaxis", "study", *words]),
    )
    return print_report(write_report(folder), as_json)
