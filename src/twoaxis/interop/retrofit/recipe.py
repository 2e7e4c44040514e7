"""How a retrofitted model is trained: what is new apart from what was there, and what is blended in step by step."""

import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal

from twoaxis.core.errors import ConfigError
from twoaxis.interop.retrofit.convert import Retrofit

BLEND = "*.blend"
"""The weights of blends."""

Base = Literal["trained", "frozen"]


def training_recipe(
    retrofit: Retrofit, new_lr_scale: float, base: Base, blend_steps: int, anneal: Sequence[Mapping[str, Any]] | None = None
) -> dict[str, Any]:
    """The part of a training recipe that knows what is new, as plain data.

    Args:
        retrofit: the model.
        new_lr_scale: factor on the learning rate of new parameters.
        base: whether the parameters that were there are `trained` or `frozen`.
        blend_steps: steps from the plain model to the whole of what is blended in.
        anneal: what moves by a schedule instead; blends that nothing moves are learned as all that is new.

    Raises:
        ConfigError: nothing is trained.
    """
    if anneal is None:
        blends = any(fnmatchcase(name, BLEND) for name in retrofit.new)
        anneal = [{"pattern": BLEND, "steps": blend_steps}] if blends else []
    moved = [name for name in retrofit.new if any(fnmatchcase(name, one["pattern"]) for one in anneal)]
    learned = [name for name in retrofit.new if name not in moved]
    if base == "frozen" and not learned:
        raise ConfigError("frozen base: nothing is left to train, since no new parameter is learned; train the base too")
    names = [name for name, _ in retrofit.model.named_parameters()]
    groups: list[dict[str, Any]] = [{"pattern": "*", "lr_scale": 0.0}] if base == "frozen" else []
    groups += [{"pattern": pattern, "lr_scale": new_lr_scale} for pattern in patterns(learned, names)]
    return {"optimizer": {"groups": groups}, **({"anneal": list(anneal)} if anneal else {})}


def patterns(chosen: Iterable[str], names: Iterable[str]) -> list[str]:
    """Patterns that match the chosen names and no other ones: with a star for the number of a block where that is possible.

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
