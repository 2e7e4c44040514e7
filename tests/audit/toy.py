"""Small models, what they read, and a run folder that was never trained."""

from pathlib import Path
from typing import Any

import torch

from twoaxis import Decoder, DecoderConfig
from twoaxis.core.measure import perturb
from twoaxis.data import Batch, prepare
from twoaxis.data.tokenizer import ByteTokenizer
from twoaxis.train import TrainConfig
from twoaxis.train.checkpoint import Checkpoint, save_checkpoint
from twoaxis.train.run_folder import RunFolder
from twoaxis.train.training_state import model_tensors

BLOCK = [{"kind": "attention", "n_heads": 2, "head_dim": 4}, {"kind": "swiglu", "d_ff": 16}]
VOCAB, TOKENS, ROWS = 64, 9, 3

TEXT = "".join(f"line {i} of a small text that repeats itself, {i * i}.\n" for i in range(300))


def model_config(depth: Any, **changes: Any) -> DecoderConfig:
    data = {"vocab_size": VOCAB, "d_model": 8, "n_layers": 3, "depth": depth, "blocks": [BLOCK]}
    return DecoderConfig.from_data({**data, **changes})


def model(depth: Any, *, moved: bool = True, **changes: Any) -> Decoder:
    built = Decoder.build(model_config(depth, **changes)).double()
    return perturb(built) if moved else built


def batches(count: int = 2, *, packed: bool = True) -> list[Batch]:
    draw = torch.Generator().manual_seed(0)
    found = []
    for _ in range(count):
        tokens = torch.randint(VOCAB, (ROWS, TOKENS + 1), generator=draw)
        documents = (torch.arange(TOKENS) >= 4).long().expand(ROWS, -1) if packed else None
        found.append(Batch(tokens[:, :-1], tokens[:, 1:], documents))
    return found


TOKENIZER = ByteTokenizer()


def run_folder(folder: Path, depth: Any = "residual", **changes: Any) -> Path:
    """A run folder with one checkpoint, whose parameters are noise."""
    text = folder / "text.txt"
    text.write_text(TEXT)
    config = TrainConfig.from_data(
        {
            "model": {"d_model": 8, "n_layers": 2, "blocks": [BLOCK], "depth": depth},
            "data": {"corpus": str(text), "seq_len": 16},
            "batch_size": 2,
            "device": "cpu",
            **changes,
        }
    )
    run = RunFolder(folder / "run")
    run.claim(config, prepare(config.data.corpus, config.data.tokenizer))
    built = perturb(Decoder.build(config.decoder(256)))
    save_checkpoint(run.checkpoints, Checkpoint(7, model_tensors(built), {"moment/x": torch.zeros(1)}, {}), keep=1)
    return run.path
