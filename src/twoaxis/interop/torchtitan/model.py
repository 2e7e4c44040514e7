"""A decoder under torchtitan's protocol for models.

Letters: B batch, T position, V vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torchtitan.protocols.model import BaseModel

from twoaxis.core.cost import Shape
from twoaxis.core.errors import ConfigError, problem
from twoaxis.core.layout import TokenLayout
from twoaxis.core.parameters import initial_values
from twoaxis.model import Decoder, DecoderConfig
from twoaxis.model.cost import decoder_cost
from twoaxis.planner.ledger import BACKWARD


class TitanDecoder(BaseModel):
    """Our decoder, as torchtitan builds, initialises and calls a model."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseModel.Config):
        """What to build.

        Attributes:
            decoder: data of a `DecoderConfig`, as plain as torchtitan's records want it.
            seed: of the initial values.
        """

        decoder: dict[str, Any]
        seed: int = 0

        @property
        def decoder_config(self) -> DecoderConfig:
            """The configuration that the data stand for."""
            return DecoderConfig.from_data(self.decoder)

        def update_from_config(self, *, config: Any, **kwargs: Any) -> None:
            """Checks the length of rows.

            Raises:
                ConfigError: rows longer than the model's documents may be.
            """
            rows, longest = config.training.seq_len, self.decoder_config.max_seq_len
            if rows > longest:
                raise ConfigError(problem("training.seq_len", rows, f"at most max_seq_len={longest}", "raise max_seq_len"))

        def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
            """Returns the parameters, and the operations of a training step per token, both as declared."""
            cost = decoder_cost(self.decoder_config, Shape(batch=1, tokens=seq_len))
            return cost.params, (1 + BACKWARD) * cost.flops // seq_len

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.seed, self.recompute = config.seed, False
        self.decoder = Decoder(config.decoder_config)

    def forward(self, tokens: Int[Tensor, "B T"], positions: Int[Tensor, "_ T"] | None = None) -> Float[Tensor, "B T V"]:
        """Returns logits; a position 0 begins another document, and documents are isolated."""
        layout = None
        if positions is not None:
            positions = positions.expand_as(tokens)
            layout = TokenLayout(positions, (positions == 0).cumsum(dim=1))
        decoder = self.decoder
        hidden, _ = decoder.hidden(decoder.embed(tokens), layout, recompute=self.recompute)
        return decoder.logits(hidden)

    def verify_module_protocol(self) -> None:
        """Passes: the modules of a decoder are plain ones, and `init_states` sets all their values."""

    @torch.no_grad()
    def init_states(self, *, buffer_device: torch.device | None = None) -> None:
        """Sets every parameter to its initial value for the seed, whole or in parts."""
        for parameter, value in initial_values(self.decoder, self.seed):
            if isinstance(parameter, DTensor):
                placed = value.to(parameter.device, parameter.dtype)
                parameter.copy_(distribute_tensor(placed, parameter.device_mesh, parameter.placements))
            else:
                parameter.copy_(value)
