"""What torchtitan's trainer is told of a decoder."""

from typing import Any

from torchtitan.protocols.model_spec import ModelSpec

from twoaxis.interop.torchtitan.model import TitanDecoder
from twoaxis.interop.torchtitan.parallelize import parallelize
from twoaxis.model import DecoderConfig


def model_spec(decoder: DecoderConfig, seed: int = 0) -> ModelSpec:
    """The decoder as torchtitan's bundle of a model and how to spread it; its flavor is the depth mixer."""
    return ModelSpec(
        name="twoaxis",
        flavor=decoder.depth.kind,
        model=TitanDecoder.Config(decoder=decoder.to_data(), seed=seed),
        parallelize_fn=parallelize,
        pipelining_fn=None,
        post_optimizer_build_fn=None,
        state_dict_adapter=None,
    )


def trainer_config(decoder: DecoderConfig, seed: int = 0, **fields: Any) -> Any:
    """A configuration of torchtitan's trainer: plain cross entropy over the logits, and no CUDA graphs.

    Args:
        decoder: the model.
        seed: of its initial values.
        fields: of `Trainer.Config`, such as `training`, `dataloader` or `hf_assets_path`, before these and its defaults.
    """
    # Here, since the trainer imports triton, which need not be there to define a run.
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.config import TrainingConfig
    from torchtitan.trainer import Trainer

    ours = {
        "model_spec": model_spec(decoder, seed),
        "loss": CrossEntropyLoss.Config(global_vocab_size=decoder.vocab_size),
        "training": TrainingConfig(seq_len=decoder.max_seq_len, disable_cuda_graphs=True),
    }
    return Trainer.Config(**{**ours, **fields})
