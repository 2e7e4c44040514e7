"""Adds mixers to a trained model, which computes the same as before and is then trained further."""

from twoaxis.checkpoints.retrofit.convert import Retrofit, convert, largest_difference, training_recipe
from twoaxis.checkpoints.retrofit.target import start_of, target_config, why_blended

__all__ = ["Retrofit", "convert", "largest_difference", "start_of", "target_config", "training_recipe", "why_blended"]
