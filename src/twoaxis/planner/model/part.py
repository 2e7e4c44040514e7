"""One sublayer in the planner and its costs; with biased projections, or as a mixture of experts.

Letters: D model width, W width of what routed experts see, E routed experts, k of them per token, F hidden width of one, S
hidden width of the shared ones, N tokens.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from twoaxis.core.cost import Cost, ElementCount, Shape
from twoaxis.core.errors import ConfigError, problem
from twoaxis.core.parameters import declarations
from twoaxis.core.position import SublayerInfo, SublayerPosition
from twoaxis.feed_forward import FeedForwardConfig, SwiGLUConfig
from twoaxis.local.places import PlacesConfig
from twoaxis.ops.rope import RotationTable
from twoaxis.sequence import SequenceConfig


@dataclass(frozen=True)
class Routed:
    """Routed experts.

    Attributes:
        experts: their number.
        used: the number of experts per token.
        params: of one expert.
    """

    experts: int
    used: int
    params: int


class Part(ABC):
    """A sublayer between its norm and its write."""

    @property
    def routed(self) -> Routed | None:
        """Its routed experts, if it has any."""
        return None

    @property
    def windows(self) -> tuple[int, ...]:
        """Numbers of tokens from which some cost of one more token is constant, such as a window and its cache."""
        return ()

    def local_channels(self, site: SublayerPosition) -> tuple[int, ...]:
        """Channels of each local mixer inside it; each runs as one more kernel."""
        return ()

    def check(self, d_model: int) -> None:  # noqa: B027
        """Raises ConfigError if the sublayer cannot be built at this width; by default it can."""

    @property
    @abstractmethod
    def kind(self) -> str:
        """The kind of the sublayer."""

    @abstractmethod
    def slot(self, d_model: int) -> SublayerInfo:
        """The properties that a depth mixer may use."""

    @abstractmethod
    def cost(self, site: SublayerPosition, shape: Shape) -> Cost:
        """The cost of one forward pass at this site, without its norm; `params` holds every parameter, used or not."""

    def rotations(self, d_model: int) -> frozenset[RotationTable]:
        """Its rotation tables, which layers share; none if the part counts its own."""
        return frozenset()

    def matrices(self, site: SublayerPosition) -> int:
        """Parameters that Muon updates; by default all, of which biases and the like are few."""
        return self.cost(site, Shape(1, 1)).params

    def in_generation(self) -> "Part":
        """The form in generation, by default the same."""
        return self


def count_matrices(module: nn.Module) -> int:
    """Numbers in the parameters of a module that are tagged as matrices."""
    return sum(parameter.numel() for _, parameter, declared in declarations(module) if declared.tag == "matrix")


@dataclass(frozen=True)
class NativeSublayer(Part):
    """A sublayer of this library, by its configuration."""

    config: SequenceConfig | FeedForwardConfig

    @property
    def kind(self) -> str:
        """The kind of its configuration."""
        return self.config.kind

    def check(self, d_model: int) -> None:
        """Asks the configuration, and refuses windows of chunks, whose costs grow in steps."""
        if isinstance(self.config, SequenceConfig):
            self.config.check(d_model)
        if isinstance(self.config, PlacesConfig):
            for local in self.config.locals:
                if getattr(local, "window_kind", "sliding") != "sliding":
                    allowed = "'sliding' in a plan, which counts tokens and visible pairs"
                    raise ConfigError(problem("window_kind", "chunk", allowed, "plan it, for about twice the pairs"))

    def slot(self, d_model: int) -> SublayerInfo:
        """Its heads and the views that it takes."""
        if not isinstance(self.config, SequenceConfig):
            return SublayerInfo(self.kind)
        heads = self.config.head_shape(d_model)
        window, hashed = self.config.pair_window, self.config.hashed
        return SublayerInfo(self.kind, self.config.accepts_qkv, heads, window=window, hashed=hashed)

    def rotations(self, d_model: int) -> frozenset[RotationTable]:
        """Those of its configuration."""
        return self.config.rotations(d_model)

    @property
    def windows(self) -> tuple[int, ...]:
        """Those of the mixer and of the local mixers inside it, and those of their caches; one token is no window."""
        fields = [self.config.receptive_field]
        if isinstance(self.config, SequenceConfig):
            fields += [self.config.pair_window, self.config.inner_field, *(n + 1 for n in self.config.histories)]
        if isinstance(self.config, PlacesConfig):
            fields += [local.receptive_field for local in self.config.locals if local is not None]
        return tuple(sorted({tokens for field in fields if field and field > 1 for tokens in (field, field - 1)}))

    def local_channels(self, site: SublayerPosition) -> tuple[int, ...]:
        """Those of its local mixers."""
        if not isinstance(self.config, PlacesConfig):
            return ()
        at = zip(self.config.locals, self.config.local_channels(site), strict=True)
        return tuple(n for local, n in at if local is not None)

    def matrices(self, site: SublayerPosition) -> int:
        """Those that are tagged so."""
        with torch.device("meta"):
            return count_matrices(self.config.build(site))

    def cost(self, site: SublayerPosition, shape: Shape) -> Cost:
        """As declared next to its mathematics."""
        return self.config.cost(site, shape)


@dataclass(frozen=True)
class Biased(NativeSublayer):
    """A sublayer of this library with additional biases.

    Cost: params and flops per token one for each bias; nothing saved, since the gradient of a bias needs no activation

    Attributes:
        biases: numbers in all biases of the sublayer.
        tables: further parameters of which a token reads few, such as an embedding of positions.

    Example:
        >>> from twoaxis.core.position import LayerStack
        >>> from twoaxis.feed_forward import GELUConfig
        >>> site = LayerStack(8, 1e-5, (1,)).sites[0]
        >>> Biased(GELUConfig(d_ff=32), biases=32 + 8).cost(site, Shape(1, 1)).params
        552
    """

    biases: int = 0
    tables: int = 0

    def cost(self, site: SublayerPosition, shape: Shape) -> Cost:
        """The cost of the configuration, and one addition per bias and token."""
        added = Cost(self.biases + self.tables, elementwise_flops=self.biases * shape.total_tokens, table_params=self.tables)
        return super().cost(site, shape) + added


ROUTER_FLOPS = 4
"""Per score: the function, the correction, the comparison and the division by the sum."""


@dataclass(frozen=True)
class Experts(Part):
    """Routed SwiGLU experts, and shared ones for every token.

    Equation: y = sum_{e in top k} w_e(x) E_e(x) + S(x);  latent: y = W_up Norm(sum_e w_e(x) E_e(W_down x)) + S(x)
    Source:   DeepSeekMoE, arXiv:2401.06066, eq. 9-11; DeepSeek-V3, arXiv:2412.19437, eq. 12-16 (correction);
              latent: Kimi K3, arXiv:2607.24653
    Cost:     params E*3*W*F + 3*D*S + E*D for the router, 2*D*W more for latent maps; matmul flops 2 per weight of router,
              maps, k experts and shared experts; saved, with fused gates, the scores, and of each token and expert its input,
              hidden activations and output; no cache. The table of token ids of `hash` is not counted as parameters

    Attributes:
        width: W, that of the model, or less with latent maps.
        n_experts: E.
        per_token: k.
        d_expert: F.
        d_shared: S, of all shared experts together; 0 without any.
        router: `scores`; `corrected`, which adds a bias per expert to the selection; or `hash`, which selects by token id.
        shared_gate: `none`, or `token`: a sigmoid of the token scales the shared output (Qwen2-MoE).
        latent: `none`; or the maps from D to W and back around the routed experts are `plain`, or have a norm between the sum
            of the experts and the way back (`rms`).

    Raises:
        ConfigError: more experts per token than there are.

    Example:
        >>> from twoaxis.core.position import LayerStack
        >>> site = LayerStack(4096, 1e-5, (1,)).sites[0]
        >>> mixtral = Experts(4096, n_experts=8, per_token=2, d_expert=14336)
        >>> mixtral.cost(site, Shape(1, 1)).params, mixtral.routed.params
        (1409318912, 176160768)
    """

    width: int
    n_experts: int
    per_token: int
    d_expert: int
    d_shared: int = 0
    router: Literal["scores", "corrected", "hash"] = "scores"
    shared_gate: Literal["none", "token"] = "none"
    latent: Literal["none", "plain", "rms"] = "none"

    def __post_init__(self) -> None:
        if self.per_token > self.n_experts:
            raise ConfigError(problem("experts per token", self.per_token, f"at most {self.n_experts} experts", "lower it"))

    @property
    def kind(self) -> str:
        """The name of the mixture."""
        return "experts"

    def slot(self, d_model: int) -> SublayerInfo:
        """A sublayer without heads."""
        return SublayerInfo(self.kind)

    @property
    def routed(self) -> Routed:
        """The routed experts."""
        return Routed(self.n_experts, self.per_token, 3 * self.width * self.d_expert)

    def cost(self, site: SublayerPosition, shape: Shape) -> Cost:
        """Costs of the router, k experts with their latent maps, and the shared experts."""
        D, W, N, E, k = site.d_model, self.width, shape.total_tokens, self.n_experts, self.per_token
        expert, shared = self.routed.params, self._shared(site, shape)
        gate = D if self.shared_gate == "token" else 0
        every = E * D + (0 if self.latent == "none" else 2 * D * W) + gate + shared.params
        small = (E if self.router == "corrected" else 0) + (W if self.latent == "rms" else 0)
        elementwise = ROUTER_FLOPS * E + SwiGLUConfig.activation_flops * k * self.d_expert + 2 * k * W
        elementwise += (D if self.d_shared else 0) + (D + 4 if gate else 0) + (4 * W if self.latent == "rms" else 0)
        return Cost(
            params=E * expert + every + small,
            matmul_flops=2 * N * (every + k * expert),
            elementwise_flops=N * elementwise + shared.elementwise_flops,
            saved_bytes=self._saved_bytes(shape),
        )

    def _shared(self, site: SublayerPosition, shape: Shape) -> Cost:
        if not self.d_shared:
            return Cost()
        # Both projections and their product.
        saved = 3 * shape.total_tokens * self.d_shared * shape.element_bytes
        return SwiGLUConfig(d_ff=self.d_shared).cost(site, shape) + Cost(saved_bytes=saved)

    def _saved_bytes(self, shape: Shape) -> int:
        N, W, k = shape.total_tokens, self.width, self.per_token
        # Per expert of a token: its input, both projections, the input of the third, and the output.
        numbers = k * (2 * W + 3 * self.d_expert) + 3 * self.d_shared + (0 if self.latent == "none" else 2 * W)
        return N * ElementCount(numbers, statistics=self.n_experts + k).bytes(shape.element_bytes)
