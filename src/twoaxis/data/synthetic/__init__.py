"""Synthetic tasks that small models can solve; each is a kind of corpus.

The docstring of a task describes its text and what solves it. `answer_cues` are the characters after which the next token
counts in the loss, in training and validation; validation also measures accuracy.
"""

from twoaxis.data.synthetic.base import SyntheticConfig
from twoaxis.data.synthetic.copying import CopyConfig
from twoaxis.data.synthetic.early_feature import EarlyFeatureConfig
from twoaxis.data.synthetic.mqar import MqarConfig
from twoaxis.data.synthetic.multi_hop import MultiHopConfig
from twoaxis.data.synthetic.switching_ngram import SwitchingNgramConfig

__all__ = ["CopyConfig", "EarlyFeatureConfig", "MqarConfig", "MultiHopConfig", "SwitchingNgramConfig", "SyntheticConfig"]
