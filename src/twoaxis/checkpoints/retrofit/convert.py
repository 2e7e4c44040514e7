"""Copying the parameters of a model into one with more mixers, and the training recipe of the result.

Letters: B batch, T position.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from twoaxis.checkpoints.layouts import sublayer_paths
from twoaxis.core.errors import CheckpointError, ConfigError
from twoaxis.core.parameters import declarations
from twoaxis.model import Decoder, DecoderConfig

OTHER_NORMS = (".key_norm.gain", ".value_norm.gain", ".depth.input_gain")
"""Norms initialised from that before the sublayer: of separate views, and where the depth mixer has it."""

BLEND = "*.blend"
"""The weights of blends."""


class Retrofit(NamedTuple):
    """A model with added mixers, in evaluation mode, and the names of its new parameters."""

    model: Decoder
    new: tuple[str, ...]

    @property
    def new_parameters(self) -> int:
        """The number of added parameters, counted in numbers."""
        return sum(self.model.get_parameter(name).numel() for name in self.new)


@torch.no_grad()
def convert(base: Decoder, target: DecoderConfig, seed: int = 0) -> Retrofit:
    """Builds the target with the parameters of the base, frozen if they are in the base; others have their initial values.

    Raises:
        ConfigError: a parameter of the base that is not in the target, or has another shape there.
    """
    model = Decoder.build(target, seed).eval()
    given: dict[str, torch.nn.Parameter] = dict(base.named_parameters())
    used: set[str] = set()
    new: list[str] = []
    renamed = _renamed(base.config, target)
    before, after = _norm_scales(base.config), _norm_scales(target)
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
        if (factor := before.get(source, 1.0) / after.get(name, 1.0)) != 1:
            # The gain makes up for another constant factor behind the norm.
            parameter.mul_(factor)
        used.add(source)
    if lost := [name for name in given if name not in used]:
        raise ConfigError(f"parameter {lost[0]!r} (and {len(lost) - 1} more) would be lost; choose options that keep it")
    return Retrofit(model, tuple(new))


def _source(name: str, given: dict[str, torch.nn.Parameter], renamed: dict[str, str]) -> str | None:
    """The parameter of the base that this one is initialised from."""
    sublayer = ".".join(name.split(".")[:3])
    name = renamed.get(sublayer, sublayer) + name.removeprefix(sublayer)
    if name in given:
        return name
    for ending in OTHER_NORMS:
        name = name.removesuffix(ending) + ".norm.gain" if name.endswith(ending) else name
    return name if name in given else None


def _norm_scales(config: DecoderConfig) -> dict[str, float]:
    """The constant factor behind the norm before each sublayer, by the name of its gain."""
    return {
        f"{path}.norm.gain": site.slot.norm_scale for path, site in zip(sublayer_paths(config), config.stack.sites, strict=True)
    }


def _renamed(base: DecoderConfig, target: DecoderConfig) -> dict[str, str]:
    """Sublayers of the target with another name in the base: attention that became `kv_shift`."""
    ours = sublayer_paths(base)
    return {
        name: name.replace(".kv_shift", ".attention")
        for name in sublayer_paths(target)
        if name not in ours and name.replace(".kv_shift", ".attention") in ours
    }


@torch.no_grad()
def largest_difference(
    one: Decoder, other: Decoder, tokens: Int[Tensor, "B T"], progress: Callable[[str, int, int], None] | None = None
) -> tuple[float, float]:
    """The largest difference between the logits of two models, and the fraction of equal next tokens.

    The difference is NaN if a logit of the other model is.

    Args:
        one: the first model.
        other: the second.
        tokens: that both read.
        progress: progress callback, optional: the name of the stage, the rows compared so far, and all rows.

    Raises:
        CheckpointError: a logit of the first model is not finite.
    """
    differences, agreed = [], 0
    for done, row in enumerate(tokens.unbind(), start=1):
        a, b = one(row[None]), other(row[None])
        if not a.isfinite().all():
            raise CheckpointError("logits of the model to begin with: must be finite numbers; fetch its weights again")
        differences.append((a - b).abs().max())
        agreed += int((a.argmax(-1) == b.argmax(-1)).sum())
        if progress:
            progress("comparing logits", done, len(tokens))
    return float(torch.stack(differences).max()), agreed / tokens.numel()


Base = Literal["trained", "frozen"]


def training_recipe(
    retrofit: Retrofit, new_lr_scale: float, base: Base, blend_steps: int, anneal: Sequence[Mapping[str, Any]] | None = None
) -> dict[str, Any]:
    """The part of a training recipe that depends on the added parameters, as plain data.

    Args:
        retrofit: the model.
        new_lr_scale: factor on the learning rate of new parameters, times the one that they declare.
        base: whether the other parameters are `trained` or `frozen`.
        blend_steps: steps from the plain model to the full blend.
        anneal: schedules in place of `blend_steps`; new parameters without one are learned, blends included.

    Raises:
        ConfigError: nothing is trained.
    """
    if anneal is None:
        blends = any(fnmatchcase(name, BLEND) for name in retrofit.new)
        anneal = [{"pattern": BLEND, "steps": blend_steps}] if blends else []
    learned = [name for name in retrofit.new if not any(fnmatchcase(name, one["pattern"]) for one in anneal)]
    if base == "frozen" and not learned:
        raise ConfigError("frozen base: nothing is left to train, since no new parameter is learned; train the base too")
    names = [name for name, _ in retrofit.model.named_parameters()]
    groups: list[dict[str, Any]] = [{"pattern": "*", "lr_scale": 0.0}] if base == "frozen" else []
    scales = {name: declared.lr_scale for name, _, declared in declarations(retrofit.model)}
    for scale in dict.fromkeys(scales[name] for name in learned):
        alike = [name for name in learned if scales[name] == scale]
        groups += [{"pattern": pattern, "lr_scale": scale * new_lr_scale} for pattern in patterns(alike, names)]
    return {"optimizer": {"groups": groups}, **({"anneal": list(anneal)} if anneal else {})}


def patterns(chosen: Iterable[str], names: Iterable[str]) -> list[str]:
    """Patterns that match the chosen names and no others, with a star for the block number where possible.

    Example:
        >>> patterns(["blocks.0.a.x", "blocks.1.a.x", "blocks.1.b"], ["blocks.0.b"])
        ['blocks.*.a.x', 'blocks.1.b']
    """
    chosen = list(chosen)
    others = set(names) - set(chosen)
    found: dict[str, None] = {}
    for name in chosen:
        pattern = re.sub(r"^blocks\.\d+\.", "blocks.*.", name)
        found[name if any(fnmatchcase(other, pattern) for other in others) else pattern] = None
    return list(found)
