"""Synthetic tasks on which a small model already decides: each is a corpus of its own kind.

A task says in its docstring what its text looks like and what a model needs to solve it. `answer_cues` are the characters
after which the next token counts, in training and validation alike; validation then also measures exact accuracy.
"""

from twoaxis.data.synthetic.base import SyntheticConfig
from twoaxis.data.synthetic.copying import CopyConfig
from twoaxis.data.synthetic.early_feature import EarlyFeatureConfig
from twoaxis.data.synthetic.mqar import MqarConfig
from twoaxis.data.synthetic.multi_hop import MultiHopConfig
from twoaxis.data.synthetic.switching_ngram import SwitchingNgramConfig

__all__ = ["CopyConfig", "EarlyFeatureConfig", "MqarConfig", "MultiHopConfig", "SwitchingNgramConfig", "SyntheticConfig"]
