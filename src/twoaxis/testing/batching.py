"""Checks that rows of a batch do not know of each other."""

from typing import Any

import torch

from twoaxis.testing.check import check, close
from twoaxis.testing.toy import AxisConfig, odd_width, toy_decoder, toy_tokens


@check
def batch_invariance(config: AxisConfig) -> None:
    """A row gives the same logits in any order of the batch, and alone."""
    model = toy_decoder(config)
    tokens = toy_tokens(batch=4)
    base = model(tokens)
    order = torch.tensor([2, 0, 3, 1])
    close("logits of the permuted batch", model(tokens[order]), base[order], "same_values")
    for size in (1, 3):
        close(f"logits of a batch of {size}", model(tokens[:size]), base[:size], "same_values")


@check
def edge_shapes(config: AxisConfig) -> None:
    """One row of one token, one layer and an odd width work, and a one-token pass equals the first of many."""
    variants: tuple[dict[str, Any], ...] = ({}, {"n_layers": 1}, {"d_model": odd_width(config)})
    for changes in variants:
        if "d_model" in changes and not _builds(config, changes["d_model"]):
            continue
        model = toy_decoder(config, **changes)
        tokens = toy_tokens(batch=1)
        full = model(tokens)
        one = model(tokens[:, :1])
        close(f"logits of one token with {changes or 'toy sizes'}", one, full[:, :1], "same_values")
        one.sum().backward()


def _builds(config: AxisConfig, d_model: int) -> bool:
    try:
        toy_decoder(config, d_model=d_model)
    except ValueError:
        return False
    return True
