"""More mixers in a model that is trained already: it computes what it did before, and is trained further from there."""

from twoaxis.checkpoints.retrofit.convert import Retrofit, convert, largest_difference, training_recipe
from twoaxis.checkpoints.retrofit.target import target_config, why_blended

__all__ = ["Retrofit", "convert", "largest_difference", "target_config", "training_recipe", "why_blended"]
