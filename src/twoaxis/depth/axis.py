"""The depth axis of a model of another code base: mixers for its sublayers, and the two ends.

Letters: B batch, T position, D width.
"""

from collections.abc import Mapping
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from twoaxis.core.measure import tensors
from twoaxis.core.mixer import uniform_stack
from twoaxis.core.position import LayerStack
from twoaxis.depth.base import (
    DepthConfig,
    DepthEnds,
    DepthMixer,
    State,
    build_outside,
    build_stack,
    check_state,
    outside_decoder,
)


class DepthAxis(nn.Module):
    """One mixer for every sublayer of a model that is not our decoder; the state runs from `enter` to `leave`.

    The host passes the state from sublayer to sublayer instead of its hidden states. It is an immutable value, a tensor or
    nested tuples of tensors; every write returns a new one.

    Cost:     `config.cost` of every sublayer and `config.ends_cost`
    Args:
        config: of any mixer of the depth axis that does not work inside attention; also as a table or a bare kind.
        d_model: D, the width of the host.
        n_layers: its blocks.
        sublayers: of each block, in order, such as attention and feed-forward.
        norm_eps: the eps of norms inside the mixers.

    Raises:
        ConfigError: sizes below 1, a mixer that works inside attention or takes more than its update, or options that do not
            fit; from a mixer or `leave`, a state with too few or too many tensors for this position, since a sublayer was left
            out. A state whose number of tensors stays the same, such as a single stream, does not show that.

    Example:
        >>> import torch
        >>> from twoaxis.depth import AttentionResidualsConfig
        >>> axis = DepthAxis(AttentionResidualsConfig(mixture="sum"), d_model=2, n_layers=3)
        >>> state = axis.enter(torch.ones(1, 1, 2))
        >>> for attention, feed_forward in axis.blocks:
        ...     state = attention(state, norm=lambda x: x / 2, sublayer=lambda context: context)
        ...     state = feed_forward(state, norm=lambda x: x / 2, sublayer=lambda context: 0 * context)
        >>> round(axis.leave(state).mean().item(), 3)
        3.375
    """

    def __init__(
        self,
        config: DepthConfig | Mapping[str, Any] | str,
        d_model: int,
        n_layers: int,
        sublayers: int = 2,
        norm_eps: float = 1e-6,
    ) -> None:
        # The table names this module's siblings, which import it.
        from twoaxis.depth import DEPTH

        super().__init__()
        config = DEPTH.parse(config)
        stack = outside_decoder(config, uniform_stack(d_model, norm_eps, n_layers, sublayers))
        mixers, ends = build_outside(config, stack)
        self.mixers, self.ends = nn.ModuleList(mixers), ends
        self._sublayers = sublayers
        *entering, self._left_tensors = _state_lengths(config, stack)
        for mixer, length in zip(mixers, entering, strict=True):
            mixer.entering_tensors = length

    @property
    def _each(self) -> list[DepthMixer]:
        return [cast(DepthMixer, mixer) for mixer in self.mixers]

    @property
    def blocks(self) -> list[tuple[DepthMixer, ...]]:
        """The mixers of each block."""
        each, step = self._each, self._sublayers
        return [tuple(each[start : start + step]) for start in range(0, len(each), step)]

    def enter(self, embeddings: Float[Tensor, "B T D"]) -> State:
        """Returns the state before the first sublayer."""
        return cast(DepthEnds, self.ends).enter(embeddings)[0]

    def leave(self, state: State) -> Float[Tensor, "B T D"]:
        """Returns the hidden states after the last sublayer, before the final norm of the host."""
        check_state(state, self._left_tensors)
        return cast(DepthEnds, self.ends).leave(state)[0]


@torch.no_grad()
def _state_lengths(config: DepthConfig, stack: LayerStack) -> list[int]:
    """Counts the tensors in the state before every sublayer and after the last, in one pass on the meta device."""
    with torch.device("meta"):
        mixers, ends = build_stack(config, stack)
        states = [ends.enter(torch.empty(1, 1, stack.d_model))[0]]
        for mixer in mixers:
            views, carry, _ = mixer.read(states[-1])
            states.append(mixer.write(states[-1], torch.empty(1, 1, stack.d_model), views, carry))
    return [len(tensors(state)) for state in states]
