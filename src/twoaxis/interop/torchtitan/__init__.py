"""Models of this library in torchtitan's trainer: `torchtitan.train --module my.runs --config small`.

`my/runs.py` holds a function that says what to train:

    def small():
        return trainer_config(DecoderConfig(vocab_size=32_000, d_model=512, n_layers=8, depth="deep_delta"))

It is written for torchtitan 0.3.0, whose interfaces still move, and for a GPU. Tested are the imports, that such a
configuration builds, that the model it builds computes what the decoder does (documents packed in a row apart), its parameters
and operations, and what is refused. Not tested: the trainer itself, which does not run on a CPU, so neither FSDP, compilation
nor checkpoints.
"""

import importlib.util

from twoaxis.core.errors import ConfigError

if importlib.util.find_spec("torchtitan") is None:
    raise ConfigError("torchtitan is not installed: must be there for its trainer; pip install 'torchtitan==0.3.0'")

from twoaxis.interop.torchtitan.model import TitanDecoder
from twoaxis.interop.torchtitan.parallelize import parallelize
from twoaxis.interop.torchtitan.runs import model_spec, trainer_config

__all__ = ["TitanDecoder", "model_spec", "parallelize", "trainer_config"]
