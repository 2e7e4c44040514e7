"""A decoder as a model of transformers and back: the same parameters, not copies of them."""

from typing import Any, cast

import torch
from torch import nn

from twoaxis.interop.hugging_face.configuration import TwoAxisConfig
from twoaxis.interop.hugging_face.modeling import TwoAxisForCausalLM
from twoaxis.interop.outside_engines import describe_attentions
from twoaxis.model import Decoder


def to_hugging_face(decoder: Decoder, **fields: Any) -> TwoAxisForCausalLM:
    """The model of transformers with the parameters of this decoder; training one trains the other.

    Args:
        decoder: the model.
        fields: of `TwoAxisConfig` beyond those of the decoder, such as `eos_token_id`.

    Example:
        >>> from twoaxis import DecoderConfig
        >>> decoder = Decoder.build(DecoderConfig(vocab_size=16, d_model=8, n_layers=1))
        >>> model, tokens = to_hugging_face(decoder), torch.tensor([[1, 2, 3]])
        >>> torch.equal(model(tokens).logits, decoder(tokens))
        True
    """
    with torch.device("meta"):
        model = TwoAxisForCausalLM(TwoAxisConfig.from_decoder(decoder.config, **fields))
    _move_children(decoder, model.model.decoder)
    describe_attentions(model.model.decoder)
    model.lm_head.weight = cast(nn.Parameter, decoder.head_weight)
    return model.train(decoder.training)


def from_hugging_face(model: TwoAxisForCausalLM) -> Decoder:
    """The decoder with the parameters of this model of transformers; training one trains the other."""
    with torch.device("meta"):
        decoder = Decoder(model.config.decoder_config)
    _move_children(model.model.decoder, decoder)
    if decoder.head is not None:
        decoder.head.weight = cast(nn.Parameter, model.lm_head.weight)
    return decoder.train(model.training)


def _move_children(source: Decoder, target: Decoder) -> None:
    for name, child in source.named_children():
        if name != "head":
            setattr(target, name, child)
