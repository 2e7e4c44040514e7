"""One module of twoaxis in a GPT written elsewhere: `python examples/drop_in/nanogpt.py [TEXT]`.

It trains four small models on the bytes of a text for 20 steps each, in seconds on a CPU. `Attention`, `Block` and `GPT` stand
for the code that you have, under the names of nanoGPT; what follows them is all that each method adds.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twoaxis import DeepDelta, DepthAxis, ShortSWA, initialise_parts


@dataclass
class GPTConfig:
    block_size: int = 64
    vocab_size: int = 256
    n_layer: int = 3
    n_head: int = 4
    n_embd: int = 64


class Attention(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.n_head, width = config.n_head, config.n_embd
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.c_attn(x).unflatten(-1, (3, self.n_head, -1)).permute(2, 0, 3, 1, 4)
        return self.c_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        width = config.n_embd
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(width), Attention(config), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, config: GPTConfig, block: type[Block] = Block) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(config.vocab_size, config.n_embd),
                "wpe": nn.Embedding(config.block_size, config.n_embd),
                "h": nn.ModuleList([block(config) for _ in range(config.n_layer)]),
                "ln_f": nn.LayerNorm(config.n_embd),
            }
        )
        self.apply(self._init_weights)
        # Ours, and last: what stands above has just overwritten the linear maps that it found in them.
        initialise_parts(self, seed=0)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)

    def run(self, x: Tensor) -> Tensor:
        for block in self.transformer.h:
            x = block(x)
        return x

    def forward(self, tokens: Tensor) -> Tensor:
        parts = self.transformer
        embeddings = parts.wte(tokens) + parts.wpe.weight[: tokens.shape[1]]
        return F.linear(parts.ln_f(self.run(embeddings)), parts.wte.weight)


class DeepDeltaBlock(Block):
    """Deep Delta Learning is the shortcut: what was `x + f(norm(x))` overwrites x along f."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config)
        self.delta_1, self.delta_2 = DeepDelta(d_model=config.n_embd), DeepDelta(d_model=config.n_embd)

    def forward(self, x: Tensor) -> Tensor:
        x = self.delta_1(x, self.ln_1, self.attn)
        return self.delta_2(x, self.ln_2, self.mlp)


class ShortSWABlock(Block):
    """A short window comes before attention. Its output starts at zero, so that a trained model is unchanged at first."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config)
        self.ln_0 = nn.LayerNorm(config.n_embd)
        self.short_swa = ShortSWA(d_model=config.n_embd, window=8, output_init="zero")

    def forward(self, x: Tensor) -> Tensor:
        update, _ = self.short_swa(self.ln_0(x))
        return super().forward(x + update)


class AttentionResidualsGPT(GPT):
    """Every sublayer reads all outputs before it, at first their sum, so that a trained model is unchanged."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config)
        self.depth = DepthAxis({"kind": "attention_residuals", "mixture": "sum"}, config.n_embd, config.n_layer)
        initialise_parts(self.depth, seed=0)

    def run(self, x: Tensor) -> Tensor:
        state = self.depth.enter(x)
        for block, (before_attn, before_mlp) in zip(self.transformer.h, self.depth.blocks, strict=True):
            state = before_attn(state, block.ln_1, block.attn)
            state = before_mlp(state, block.ln_2, block.mlp)
        return self.depth.leave(state)


def train(model: nn.Module, text: bytes, steps: int = 20) -> list[float]:
    """Trains on random windows, the same ones for every model, and returns the loss of each step in nats per byte."""
    data, generator = torch.tensor(list(text)), torch.Generator().manual_seed(0)
    optimizer, losses, window = torch.optim.AdamW(model.parameters(), lr=3e-3), [], torch.arange(GPTConfig.block_size + 1)
    for _ in range(steps):
        windows = data[torch.randint(len(data) - GPTConfig.block_size, (8, 1), generator=generator) + window]
        loss = F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        optimizer.zero_grad()
    return losses


if __name__ == "__main__":
    text = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[2] / "README.md").read_bytes()
    for make, *block in ((GPT,), (GPT, DeepDeltaBlock), (AttentionResidualsGPT,), (GPT, ShortSWABlock)):
        torch.manual_seed(0)
        losses = [round(loss, 2) for loss in train(make(GPTConfig(), *block), text)[::3]]
        print(" of ".join(kind.__name__ for kind in (make, *block)), losses)
