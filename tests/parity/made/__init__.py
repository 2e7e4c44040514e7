"""Fixtures in the formats of the authors' runs at other shapes, made from their equations and by no operator of the library.

They certify nobody's code. They show that the adapters read every size and option from a fixture.
"""

from collections.abc import Callable, Mapping

from . import bare, decoders, gpt, muddformer, operators, tinylm
from .draft import Draft

Maker = Callable[[], Draft]

MADE: Mapping[str, Maker] = {
    **operators.MADE,
    **gpt.MADE,
    **tinylm.MADE,
    **bare.MADE,
    **decoders.MADE,
    **muddformer.MADE,
}
"""What makes each fixture, by its name."""

__all__ = ["MADE", "Draft"]
