"""A mixture of experts: a router sends every token to a few feed-forwards out of many.

Letters: D model width, W width of what routed experts see, E routed experts, k of them per token, F hidden width of one,
S hidden width of the shared ones, N tokens.
"""

from dataclasses import dataclass
from typing import Literal

from twoaxis.core.cost import Cost, Shape
from twoaxis.core.errors import ConfigError, problem
from twoaxis.core.site import Site, Slot
from twoaxis.core.state import Numbers
from twoaxis.feed_forward import SwiGLUConfig
from twoaxis.planner.model.part import Part, Routed

ROUTER_FLOPS = 4
"""Per score: the function, the correction, the comparison and the division by the sum."""


@dataclass(frozen=True)
class Experts(Part):
    """Routed SwiGLU experts, and shared ones that see every token.

    Equation: y = sum_{e in top k} w_e(x) E_e(x) + S(x);  latent: y = W_up Norm(sum_e w_e(x) E_e(W_down x)) + S(x)
    Source:   DeepSeekMoE, arXiv:2401.06066, eq. 9-11; DeepSeek-V3, arXiv:2412.19437, eq. 12-16 (correction);
              latent: Kimi K3, arXiv:2607.24653
    Cost:     params E*3*W*F + 3*D*S + E*D for the router, 2*D*W more for latent maps; matmul flops 2 per weight of router,
              maps, k experts and shared experts; saved, with fused gates, the scores, each copy of a token that an expert
              sees, its hidden numbers and its output; nothing carried from token to token. `hash` finds experts in a table
              of token ids, which is not counted as parameters

    Attributes:
        width: W, that of the model, or less with latent maps.
        n_experts: E.
        per_token: k.
        d_expert: F.
        d_shared: S, of all shared experts together; 0 without any.
        router: `scores`; `corrected`, which adds a number per expert to choose by; or `hash`, which chooses by token id.
        shared_gate: `none`, or `token`: a sigmoid of the token scales the shared output (Qwen2-MoE).
        latent: `none`; or the maps from D to W and back around the routed experts are `plain`, or have a norm between the sum
            of the experts and the way back (`rms`).

    Raises:
        ConfigError: more experts per token than there are.

    Example:
        >>> from twoaxis.core.site import Stack
        >>> site = Stack(4096, 1e-5, (1,)).sites[0]
        >>> mixtral = Experts(4096, n_experts=8, per_token=2, d_expert=14336)
        >>> mixtral.cost(site, Shape(1, 1)).params, int(mixtral.parameters_read(site, tokens=1))
        (1409318912, 352354304)
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

    def slot(self, d_model: int) -> Slot:
        """A sublayer without heads."""
        return Slot(self.kind)

    @property
    def routed(self) -> Routed:
        """The experts that tokens are sent to."""
        return Routed(self.n_experts, self.per_token, 3 * self.width * self.d_expert)

    def cost(self, site: Site, shape: Shape) -> Cost:
        """The router, k experts between their latent maps, and the shared experts."""
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

    def _shared(self, site: Site, shape: Shape) -> Cost:
        if not self.d_shared:
            return Cost()
        # Both projections and their product.
        saved = 3 * shape.total_tokens * self.d_shared * shape.element_bytes
        return SwiGLUConfig(d_ff=self.d_shared).cost(site, shape) + Cost(saved_bytes=saved)

    def _saved_bytes(self, shape: Shape) -> int:
        N, W, k = shape.total_tokens, self.width, self.per_token
        # Of every expert that sees a token: its copy, both projections, what is projected down, and the output.
        numbers = k * (2 * W + 3 * self.d_expert) + 3 * self.d_shared + (0 if self.latent == "none" else 2 * W)
        return N * Numbers(numbers, statistics=self.n_experts + k).bytes(shape.element_bytes)
