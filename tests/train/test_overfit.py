"""Every depth mixer can learn one batch by heart; conformance checks the gradients of its other forms."""

import pytest
import torch
from torch import Tensor

from twoaxis import DEPTH, Decoder, DecoderConfig
from twoaxis.data import Batch
from twoaxis.train.optim import OptimizerConfig, build_optimizer, parameter_groups
from twoaxis.train.parallel.placement import Placement
from twoaxis.train.step import take_step

DEPTHS = [pytest.param(row.example(next(iter(row.examples))), id=row.kind) for row in DEPTH]


@pytest.mark.parametrize("depth", DEPTHS)
def test_learns_one_batch_by_heart(depth: object) -> None:
    blocks = [[{"kind": "attention", "n_heads": 2}, "swiglu"]]
    data = {"vocab_size": 11, "d_model": 16, "n_layers": 2, "depth": depth, "blocks": blocks}
    model = Decoder.build(DecoderConfig.from_data(data))
    tokens = torch.randint(11, (2, 9))
    batch = Batch(tokens[:, :-1].clone(), tokens[:, 1:].clone(), None)
    config = OptimizerConfig(lr=0.02, weight_decay=0.0)
    optimizer = build_optimizer(parameter_groups(model, config), config)
    losses: list[float] = []

    def loss(part: Batch) -> Tensor:
        return model.loss(part.tokens, part.targets)[0]

    while len(losses) < 80 and not (losses and losses[-1] < 0.05):
        step = take_step(Placement(), loss, optimizer, batch, rows=2, multiplier=1.0, clip_norm=1.0)
        losses.append(step.loss)
    assert losses[0] > 2.0
    assert losses[-1] < 0.1
