"""Alias of `twoaxis.interop.engines.torchtitan`, for command lines with `--module twoaxis.interop.torchtitan`."""

from twoaxis.interop.engines.torchtitan import (
    TitanDecoder,
    deep_delta,
    model_spec,
    parallelize,
    plain,
    recommended_block,
    trainer_config,
)

__all__ = ["TitanDecoder", "deep_delta", "model_spec", "parallelize", "plain", "recommended_block", "trainer_config"]
