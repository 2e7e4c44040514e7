"""How a retrofitted model is trained: what is new apart from what was there, and what is blended in step by step."""

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any, Literal

from twoaxis.interop.retrofit.convert import Retrofit

BLEND = "*.blend"
"""The weights of blends."""

Base = Literal["trained", "frozen"]


def training_recipe(retrofit: Retrofit, new_lr_scale: float, base: Base, blend_steps: int) -> dict[str, Any]:
    """The part of a training recipe that knows what is new, as plain data.

    Args:
        retrofit: the model.
        new_lr_scale: factor on the learning rate of new parameters.
        base: whether the parameters that were there are `trained` or `frozen`.
        blend_steps: steps from the plain model to the whole of what is blended in.
    """
    names = [name for name, _ in retrofit.model.named_parameters()]
    learned = [name for name in retrofit.new if not fnmatchcase(name, BLEND)]
    groups: list[dict[str, Any]] = [{"pattern": "*", "lr_scale": 0.0}] if base == "frozen" else []
    groups += [{"pattern": pattern, "lr_scale": new_lr_scale} for pattern in patterns(learned, names)]
    recipe: dict[str, Any] = {"optimizer": {"groups": groups}}
    if any(fnmatchcase(name, BLEND) for name in retrofit.new):
        recipe["anneal"] = [{"pattern": BLEND, "steps": blend_steps}]
    return recipe


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
