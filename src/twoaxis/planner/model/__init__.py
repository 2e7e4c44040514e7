"""Models in the planner: their sublayers, their depth mixer, and the costs of both; nothing is built."""

from twoaxis.planner.model.part import NativeSublayer, Part, Routed
from twoaxis.planner.model.read import preset_names, read_model
from twoaxis.planner.model.shape import ModelShape

__all__ = ["ModelShape", "NativeSublayer", "Part", "Routed", "preset_names", "read_model"]
