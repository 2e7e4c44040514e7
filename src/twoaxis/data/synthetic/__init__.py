"""Synthetic tasks that small models can solve; each is a kind of corpus.

The docstring of a task describes its text and what solves it. `answer_cues` are the characters after which the next token
counts in the loss, in training and validation; validation also measures accuracy.
"""

from twoaxis.data.synthetic.base import SyntheticConfig
from twoaxis.data.synthetic.tasks import CopyConfig, EarlyFeatureConfig, MqarConfig, MultiHopConfig, SwitchingNgramConfig

__all__ = ["CopyConfig", "EarlyFeatureConfig", "MqarConfig", "MultiHopConfig", "SwitchingNgramConfig", "SyntheticConfig"]
