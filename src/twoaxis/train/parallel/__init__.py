"""A decoder on several processes: cut along depth into the stages of a pipeline.

`Pipeline` runs the steps of a training loop; `PipelineConfig` sets the stages and the schedule.
"""

from twoaxis.train.parallel.pipeline import Pipeline, PipelineLoss
from twoaxis.train.parallel.plan import PipelineConfig, Plan, make_plan

__all__ = ["Pipeline", "PipelineConfig", "PipelineLoss", "Plan", "make_plan"]
