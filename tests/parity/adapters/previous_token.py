"""The token before: RWKV's token shift, and the smear gate of nanochat and modded-nanogpt."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from twoaxis.core.layout import TokenLayout
from twoaxis.core.position import LayerStack
from twoaxis.local import SmearConfig, TokenShiftConfig, smear, token_shift
from twoaxis.local.base import TokenHistory
from twoaxis.ops.causal_conv import causal_conv, previous_token

from ..golden import Golden
from . import Adapter, Mistake


def run_shift(golden: Golden) -> Mapping[str, Tensor]:
    """One mixer for each of their readers; the difference of tokens is what a share of 1 adds."""
    d = golden.about["config"]["d"]
    x, mu = golden.take("input/x").requires_grad_(), golden.take("param/mu")
    place = LayerStack(d, 1e-6, (1,)).sites[0]
    mixers = [TokenShiftConfig().build(d, place).double() for _ in (*mu, None)]
    with torch.no_grad():
        for mixer, share in zip(mixers, (*mu, torch.ones(d)), strict=True):
            mixer.mu.copy_(share)
    *readers, whole = mixers
    layout, packed = TokenLayout.contiguous(x.shape[1]), golden.take("input/x_packed")
    made = torch.stack([mixer(x, layout)[0] for mixer in readers])
    grad_x, *grads = torch.autograd.grad(made, (x, *(mixer.mu for mixer in readers)), golden.take("input/cotangent"))
    starts = golden.take("input/cu_seqlens").diff()
    documents = torch.repeat_interleave(torch.arange(len(starts)), starts).unsqueeze(0)
    return {
        "output/mixed": made,
        "output/delta": whole(x, layout)[0] - x,
        "output/delta_packed": whole(packed, TokenLayout.packed(documents))[0] - packed,
        "grad/x": grad_x,
        "grad/mu": torch.stack(grads),
    }


def run_smear(golden: Golden) -> Mapping[str, Tensor]:
    """One pass, and cached ones in the chunks of which their code gets the last wrong."""
    config, x = golden.about["config"], golden.take("input/x").requires_grad_()
    place, gate = LayerStack(config["d"], 1e-6, (1,)).sites[0], golden.take("param/smear_gate.weight").squeeze(0)
    strength, found = golden.take("param/smear_lambda"), []
    for channels in (config["gate_channels_nanochat"], config["gate_channels_modded"]):
        mixer = SmearConfig(gate_channels=channels).build(config["d"], place).double()
        with torch.no_grad():
            mixer.gate.copy_(gate[:channels])
            mixer.strength.copy_(strength)
        found.append((mixer, mixer(x, TokenLayout.contiguous(x.shape[1]))[0]))
    (nanochat, y), (_, modded) = found
    of = (x, nanochat.gate, nanochat.strength)
    grad_x, grad_gate, grad_strength = torch.autograd.grad(y, of, golden.take("input/cotangent"))
    tokens = x.shape[1]
    for sizes in ((1,) * tokens, (tokens - 1, 1), (min(3, tokens - 2), 1, tokens - 1 - min(3, tokens - 2)), (3, tokens - 3)):
        cache, parts = nanochat.new_cache(), []
        for part in x.split(sizes, dim=1):
            made, cache = nanochat(part, TokenLayout.contiguous(part.shape[1]), cache)
            parts.append(made)
        message = f"{golden.name}: output/y in chunks {sizes} differs"
        torch.testing.assert_close(torch.cat(parts, dim=1), golden.tensors["output/y"], rtol=1e-13, atol=1e-13, msg=message)
    return {
        "output/y": y,
        "output/y_modded_row0": modded[0],
        "grad/x": grad_x,
        "grad/smear_gate.weight": grad_gate.unsqueeze(0),
        "grad/smear_lambda": grad_strength,
    }


def _across_documents(patch: pytest.MonkeyPatch) -> None:
    def packed(x: Tensor, taps: Tensor, *given: Any, documents: Any = None, **options: Any) -> Tensor:
        return causal_conv(x, taps, *given, **options)

    patch.setattr(token_shift, "causal_conv", packed)


def _share_of_the_current_token(patch: pytest.MonkeyPatch) -> None:
    def swapped(x: Tensor, taps: Tensor, *given: Any, **options: Any) -> Tensor:
        return causal_conv(x, taps.flip(-1), *given, **options)

    patch.setattr(token_shift, "causal_conv", swapped)


def _smeared_token_before(patch: pytest.MonkeyPatch) -> None:
    """Every token takes in the smeared one before it, and so a little of all earlier ones."""

    def smeared(x: Tensor, *given: Any) -> Tensor:
        before = previous_token(x, *given)
        return before + 0.1 * previous_token(before)

    patch.setattr(smear, "previous_token", smeared)


def _cache_of_single_steps(patch: pytest.MonkeyPatch) -> None:
    """Later chunks of several tokens begin without the token before them."""

    def forgetful(x: Tensor, history: Tensor | None, documents: Any) -> Tensor:
        return previous_token(x, history if x.shape[1] == 1 else None, documents)

    patch.setattr(smear, "previous_token", forgetful)


def _cache_behind_the_mixer(patch: pytest.MonkeyPatch) -> None:
    right = smear.Smear.forward

    def late(self: smear.Smear, x: Tensor, layout: TokenLayout, cache: Any = None, context: Any = None) -> Any:
        y, following = right(self, x, layout, cache, context)
        return y, None if following is None else TokenHistory(y[:, -1:])

    patch.setattr(smear.Smear, "forward", late)


ADAPTER = Adapter(
    claims={r"token-shift.*": run_shift, r"smear.*": run_smear},
    mistakes=(
        Mistake("no reset at the start of a document", "token-shift", _across_documents),
        Mistake("shares of the current token", "token-shift", _share_of_the_current_token),
        Mistake("the token before it is smeared already", "smear", _smeared_token_before),
        Mistake("a cache for single steps only", "smear", _cache_of_single_steps),
        Mistake("a cache of smeared tokens", "smear", _cache_behind_the_mixer),
    ),
)
