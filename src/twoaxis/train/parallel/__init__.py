"""A decoder on several processes: cut along depth into the stages of a pipeline.

`Pipeline` runs the steps of a training loop; `PipelineConfig` sets the stages and the schedule.
"""

from twoaxis.train.parallel.boundaries import PipelineConfig, Plan, make_plan
from twoaxis.train.parallel.pipeline import Pipeline, PipelineLoss

__all__ = ["Pipeline", "PipelineConfig", "PipelineLoss", "Plan", "make_plan"]
