"""One module of twoaxis in a GPT written elsewhere: `python examples/drop_in/nanogpt.py [TEXT]`.

It trains four small models on the bytes of a text for 20 steps each, in seconds on a CPU. `Attention`, `Block` and `GPT` stand
for the code that you have; what follows them is all that each method adds.
"""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twoaxis import DeepDelta, DepthAxis, ShortSWA, initialise_parts

WIDTH, HEADS, LAYERS, CONTEXT = 64, 4, 3, 64


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, block: type[Block] = Block) -> None:
        super().__init__()
        self.tokens, self.positions, self.ln_f = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH), nn.LayerNorm(WIDTH)
        self.blocks = nn.Sequential(*(block() for _ in range(LAYERS)))
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
        # Ours, and last: the loop has just overwritten the linear maps that it found in them.
        initialise_parts(self, seed=0)

    def run(self, x: Tensor) -> Tensor:
        return self.blocks(x)

    def forward(self, tokens: Tensor) -> Tensor:
        embeddings = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        return F.linear(self.ln_f(self.run(embeddings)), self.tokens.weight)


class DeepDeltaBlock(Block):
    """Deep Delta Learning is the shortcut: what was `x + f(norm(x))` overwrites x along f."""

    def __init__(self) -> None:
        super().__init__()
        self.delta_1, self.delta_2 = DeepDelta(d_model=WIDTH), DeepDelta(d_model=WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.delta_2(self.delta_1(x, self.ln_1, self.attn), self.ln_2, self.mlp)


class ShortSWABlock(Block):
    """A short window comes before attention. Its output starts at zero, so that a trained model is unchanged at first."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_0, self.short_swa = nn.LayerNorm(WIDTH), ShortSWA(d_model=WIDTH, window=8, output_init="zero")

    def forward(self, x: Tensor) -> Tensor:
        update, _ = self.short_swa(self.ln_0(x))
        return super().forward(x + update)


class AttentionResidualsGPT(GPT):
    """Every sublayer reads all outputs before it, at first their sum, so that a trained model is unchanged."""

    def __init__(self) -> None:
        super().__init__()
        self.depth = DepthAxis({"kind": "attention_residuals", "mixture": "sum"}, WIDTH, LAYERS)

    def run(self, x: Tensor) -> Tensor:
        state = self.depth.enter(x)
        for block, (before_attn, before_mlp) in zip(self.blocks, self.depth.blocks, strict=True):
            state = before_attn(state, block.ln_1, block.attn)
            state = before_mlp(state, block.ln_2, block.mlp)
        return self.depth.leave(state)


def train(model: nn.Module, text: bytes, steps: int = 20) -> list[float]:
    """Trains on random windows, the same ones for every model, and returns the loss of each step in nats per byte."""
    data, generator = torch.tensor(list(text)), torch.Generator().manual_seed(0)
    optimizer, losses, window = torch.optim.AdamW(model.parameters(), lr=3e-3), [], torch.arange(CONTEXT + 1)
    for _ in range(steps):
        windows = data[torch.randint(len(data) - CONTEXT, (8, 1), generator=generator) + window]
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
        losses = [round(loss, 2) for loss in train(make(*block), text)[::3]]
        print(" of ".join(kind.__name__ for kind in (make, *block)), losses)
