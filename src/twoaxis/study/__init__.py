"""Floor 6: comparisons of arms with a control, run in pairs, decided by a rule fixed before the first run.

`read_study` reads a study file; `twoaxis.study.running.run_study` runs it; `twoaxis.study.report.write_report` reports it. The
module itself may be called: `twoaxis.study(file)` does all three. Statistics, tables and figures import their libraries, so
they stay out of this file.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from twoaxis.core.config import with_overrides
from twoaxis.core.files import default_name
from twoaxis.study.design import BudgetConfig, DecisionConfig, StudyConfig, read_study

if TYPE_CHECKING:
    from twoaxis.study.report_data import ReportData
    from twoaxis.study.running.study_progress import StudyProgress

__all__ = ["BudgetConfig", "DecisionConfig", "StudyConfig", "read_study"]


class StudyModule(ModuleType):
    """The module, which can be called; for the reason see `twoaxis.train.TrainModule`."""

    def __call__(
        self,
        study: StudyConfig | Mapping[str, Any] | Path | str,
        folder: Path | str | None = None,
        overrides: Sequence[str] = (),
        *,
        jobs: int = 1,
        progress: "StudyProgress | None" = None,
    ) -> "ReportData":
        """Runs a study, or goes on with it, writes its report, and returns the data of the report.

        Args:
            study: a TOML or JSON file, the same as data, or a configuration.
            folder: of the study; None is one in `runs`, named after the file or by the content of the study.
            overrides: changes as `key=value`.
            jobs: runs at once; each is a process of its own.
            progress: called while the study goes on; None shows nothing.

        Raises:
            ConfigError: a study that cannot be run.
            StudyError: the folder holds another study, or another process runs it.
            DataError: a corpus or tokenizer that cannot be used.
        """
        from twoaxis.study.report import write_report
        from twoaxis.study.running import run_study
        from twoaxis.study.running.engine import LocalEngine

        if isinstance(study, Path | str):
            config = read_study(study, overrides)
        else:
            config = with_overrides(StudyConfig.parse(study), overrides)
        path = Path("runs") / default_name("study", study, config) if folder is None else Path(folder)
        run_study(config, path, progress=progress, engine=LocalEngine(jobs, config.processes))
        return write_report(path).data


sys.modules[__name__].__class__ = StudyModule
