"""Floor 6: comparisons of arms with a control, run in pairs, decided by a rule fixed before the first run.

`read_study` reads a study file; `twoaxis.study.running.run_study` runs it; `twoaxis.study.report.write_report` reports it.
Statistics, tables and figures import their libraries, so they stay out of this file.
"""

from twoaxis.study.design import BudgetConfig, DecisionConfig, StudyConfig, read_study

__all__ = ["BudgetConfig", "DecisionConfig", "StudyConfig", "read_study"]
