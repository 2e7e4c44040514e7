"""Moving the parameters of a model into one with more mixers.

Letters: B batch, T position.
"""

from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from twoaxis.core.errors import CheckpointError, ConfigError
from twoaxis.interop.state_maps import decoder_sublayers
from twoaxis.model import Decoder, DecoderConfig

SPLIT_NORMS = (".key_norm.gain", ".value_norm.gain")
"""Norms of separate views, which all begin as the norm of the one view."""


class Retrofit(NamedTuple):
    """A model with more mixers, and what is new in it.

    Attributes:
        model: in evaluation mode.
        new: the names of parameters that the model did not have.
    """

    model: Decoder
    new: tuple[str, ...]

    @property
    def new_parameters(self) -> int:
        """How many numbers are new."""
        return sum(self.model.get_parameter(name).numel() for name in self.new)


@torch.no_grad()
def convert(base: Decoder, target: DecoderConfig, seed: int = 0) -> Retrofit:
    """Builds the target with the parameters of the base, frozen where they are there, and what is new at its initial value.

    Raises:
        ConfigError: a parameter of the base that has no place in the target, or another shape there.
    """
    model = Decoder.build(target, seed).eval()
    given: dict[str, torch.nn.Parameter] = dict(base.named_parameters())
    used: set[str] = set()
    new: list[str] = []
    renamed = _renamed(base.config, target)
    for name, parameter in model.named_parameters():
        source = _source(name, given, renamed)
        if source is None:
            new.append(name)
            continue
        if given[source].shape != parameter.shape:
            raise ConfigError(
                f"parameter {source!r} is {list(given[source].shape)}, but {list(parameter.shape)} in the new model: must be "
                "equal; choose options that leave it as it is"
            )
        parameter.copy_(given[source]).requires_grad_(given[source].requires_grad)
        used.add(source)
    if lost := [name for name in given if name not in used]:
        raise ConfigError(f"parameter {lost[0]!r} (and {len(lost) - 1} more) would be lost; choose options that keep it")
    return Retrofit(model, tuple(new))


def _source(name: str, given: dict[str, torch.nn.Parameter], renamed: dict[str, str]) -> str | None:
    """The parameter of the base that this one begins as."""
    sublayer = ".".join(name.split(".")[:3])
    name = renamed.get(sublayer, sublayer) + name.removeprefix(sublayer)
    if name in given:
        return name
    for ending in SPLIT_NORMS:
        name = name.removesuffix(ending) + ".norm.gain" if name.endswith(ending) else name
    return name if name in given else None


def _renamed(base: DecoderConfig, target: DecoderConfig) -> dict[str, str]:
    """Sublayers of the target under another name than in the base: attention that became `kv_shift`."""
    ours = decoder_sublayers(base)
    return {
        name: name.replace(".kv_shift", ".attention")
        for name in decoder_sublayers(target)
        if name not in ours and name.replace(".kv_shift", ".attention") in ours
    }


@torch.no_grad()
def largest_difference(one: Decoder, other: Decoder, tokens: Int[Tensor, "B T"]) -> tuple[float, float]:
    """The largest difference between the logits of two models, and the share of next tokens on which they agree.

    The difference is no number where a logit of the other model is none.

    Raises:
        CheckpointError: a logit of the first model is no finite number.
    """
    differences, agreed = [], 0
    for row in tokens.unbind():
        a, b = one(row[None]), other(row[None])
        if not a.isfinite().all():
            raise CheckpointError("logits of the model to begin with: must be finite numbers; fetch its weights again")
        differences.append((a - b).abs().max())
        agreed += int((a.argmax(-1) == b.argmax(-1)).sum())
    return float(torch.stack(differences).max()), agreed / tokens.numel()
