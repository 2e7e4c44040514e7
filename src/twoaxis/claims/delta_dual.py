"""Claim 11: Deep Delta Learning is the delta rule with the sublayer index as time.

Letters: R rows (tokens of the batch), D width, C value channels, G sublayers.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from twoaxis.claims.claim import PAPER, Claim, Evidence, Finding, gradients_of
from twoaxis.claims.toy_models import D_MODEL, decoder, tokens
from twoaxis.core.measure import distance, noise
from twoaxis.depth import DeepDelta, DeepDeltaConfig
from twoaxis.model import Decoder
from twoaxis.model.trace import Trace, sublayer_list, trace
from twoaxis.ops.delta import delta_writes
from twoaxis.ops.gated_delta import gated_delta
from twoaxis.ops.precision import Impl

FORMS: dict[str, DeepDeltaConfig] = {
    "one channel": DeepDeltaConfig(value_target="paper"),
    "four channels, compressed along channels": DeepDeltaConfig(
        value_channels=4, compressor="channel", value_target="code", gate="two_layer", gate_width=5
    ),
    "two channels, compressed along time": DeepDeltaConfig(value_channels=2, compressor="time", value_target="paper"),
    "three channels from a convolved embedding": DeepDeltaConfig(
        value_channels=3, compressor="channel", expansion="embedding_conv", value_target="code_linear"
    ),
}
"""Forms that cover every compressor, target, gate and expansion of the authors."""

ENGINES: tuple[Impl, ...] = ("reference", "fused")
OUTPUTS, GRADIENTS, VISIBLE = 1e-12, 1e-11, 1e-3


class Writes(NamedTuple):
    """All writes of one pass, with tokens as rows.

    Attributes:
        states: [R D C] before the first sublayer and after each.
        keys: unit directions, up to the eps of the norm.
        gates: beta.
        targets: v.
    """

    states: tuple[Float[Tensor, "R D C"], ...]
    keys: Float[Tensor, "R G D"]
    gates: Float[Tensor, "R G"]
    targets: Float[Tensor, "R G C"]

    @property
    def times(self) -> int:
        """G, the number of sublayers."""
        return self.keys.shape[1]


@torch.no_grad()
def captured(model: Decoder) -> Writes:
    """The states of a decoder with the mixer `deep_delta`, and the keys, gates and targets that made them."""
    run = trace(model, tokens())
    keys, gates, targets = zip(
        *(_write(run, index, sublayer.depth) for index, sublayer in enumerate(sublayer_list(model))), strict=True
    )
    states = tuple(torch.stack(_channels(state), dim=-1).flatten(0, 1) for state in run.states)
    rows = [torch.stack(parts, dim=2).flatten(0, 1) for parts in (keys, gates, targets)]
    return Writes(states, *rows)


def _channels(state: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (state,) if isinstance(state, Tensor) else state


def _write(run: Trace, index: int, mixer: DeepDelta) -> tuple[Tensor, Tensor, Tensor]:
    """Key, gate and target of one write: [B T D], [B T] and [B T C]."""
    state, update, context = run.states[index], run.updates[index], run.contexts[index]
    _, carry, _ = mixer.read(state)
    target = mixer.target(state, context).unsqueeze(0) if carry is None else mixer.target(carry, context)
    return unit(update, mixer.config.direction_eps), mixer.gate(context), target.movedim(0, -1)


def unit(direction: Float[Tensor, "*n D"], eps: float) -> Float[Tensor, "*n D"]:
    """The direction divided by its length, up to eps."""
    return direction / (direction.pow(2).sum(-1, keepdim=True) + eps * eps).sqrt()


def over_depth(writes: Writes, upto: int, impl: Impl, decay_log: float = 0.0) -> Float[Tensor, "R D C"]:
    """The state after some sublayers by the operator of Gated DeltaNet, with one head and sublayers as time."""
    k, v, beta = (part[:, None, :upto] for part in (writes.keys, writes.targets, writes.gates))
    start = writes.states[0].transpose(1, 2)[:, None]
    _, last = gated_delta(k, k, v, torch.full_like(beta, decay_log), beta, state=start, impl=impl)
    return last[:, 0].transpose(1, 2)


def corrected_targets(writes: Writes) -> Float[Tensor, "R G C"]:
    """U of the closed form X_G = X_0 + K^T U: (I + tril(diag(beta) K K^T, -1)) U = diag(beta) (V - K X_0)."""
    keys, beta = writes.keys, writes.gates.unsqueeze(-1)
    overlap = (beta * (keys @ keys.transpose(1, 2))).tril(-1)
    eye = torch.eye(writes.times, dtype=keys.dtype)
    return torch.linalg.solve_triangular(eye + overlap, beta * (writes.targets - keys @ writes.states[0]), upper=False)


def products(writes: Writes) -> list[Float[Tensor, "R D D"]]:
    """A_(G-1) ... A_j for j = 0..G, with A_j = I - beta_j k_j k_j^T; the last is the identity."""
    D = writes.keys.shape[-1]
    found = [torch.eye(D, dtype=writes.keys.dtype).expand(len(writes.keys), D, D)]
    for time in reversed(range(writes.times)):
        k, beta = writes.keys[:, time, :, None], writes.gates[:, time, None, None]
        found.append(found[-1] - beta * (found[-1] @ k) @ k.transpose(1, 2))
    return found[::-1]


def path_logits(writes: Writes, q: Float[Tensor, "R D"]) -> Float[Tensor, "R G"]:
    """The logits q^T A_(G-1) ... A_(j+1) k_j of a linear read of the last state, those of PaTH with w = k."""
    after = zip(products(writes)[1:], writes.keys.unbind(1), strict=True)
    return torch.stack([torch.einsum("ri,rij,rj->r", q, A, k) for A, k in after], dim=1)


def linear_read(writes: Writes, q: Float[Tensor, "R D"]) -> Float[Tensor, "R C"]:
    """The read q^T X_G by its logits: the remainder of the first state, plus each target times logit and gate."""
    left = torch.einsum("ri,rij,rjc->rc", q, products(writes)[0], writes.states[0])
    return left + torch.einsum("rg,rgc->rc", writes.gates * path_logits(writes, q), writes.targets)


def compute() -> Finding:
    """Captures the writes of each form and compares them with the sequence operator and its closed forms."""
    found, most, largest = Evidence(), 0, 0.0
    for name, config in FORMS.items():
        model = decoder(config)
        writes = captured(model)
        compare_states(found, name, writes)
        compare_closed_forms(found, name, writes)
        compare_gradients(found, name, writes, config.direction_eps)
        most, largest = max(most, writes.times), max(largest, float(writes.gates.max()))
    check_limits(found)
    found.true("some gate is above 1, which the gate of Gated DeltaNet never is", largest > 1)
    return found.finding(
        f"{len(FORMS)} forms of deep_delta in float64, states captured from running decoders of {most} sublayers: "
        "ops.gated_delta without decay, with one head, the keys, gates and targets of each token and its embedding as the "
        f"first state, gives the state after every sublayer within {OUTPUTS:.0e} in both engines, and gradients within "
        f"{GRADIENTS:.0e}.",
        "Closed forms hold on the same states: X_G = X_0 + K^T U (the WY form); the prediction k^T X of a write is causal "
        "linear attention over depth without a normaliser, whose scores are products of keys and whose values are corrected "
        "targets; a read q^T X_G has the logits of PaTH without their softmax.",
        "Not so for the write-only form, nor with a decay. Keys, gates and targets depend on the state here, on the input "
        "along the sequence: depth has no parallel scan.",
    )


def compare_states(found: Evidence, name: str, writes: Writes) -> None:
    """Compares the state after every sublayer with the sequence operator."""
    for upto in range(1, writes.times + 1):
        for impl in ENGINES:
            found.close(f"state after a write, {name}, {impl}", over_depth(writes, upto, impl), writes.states[upto], OUTPUTS)
    decayed = over_depth(writes, writes.times, "reference", decay_log=-0.1)
    found.apart(f"state with a decay, {name}", decayed, writes.states[-1], VISIBLE)


def compare_closed_forms(found: Evidence, name: str, writes: Writes) -> None:
    """Compares the last state, the predictions inside writes and a linear read with their closed forms."""
    first, last, keys = writes.states[0], writes.states[-1], writes.keys
    U = corrected_targets(writes)
    found.close(f"WY form, {name}", first + keys.transpose(1, 2) @ U, last, OUTPUTS)
    scores = (keys @ keys.transpose(1, 2)).tril(-1)
    predictions = torch.stack([k.unsqueeze(1) @ x for k, x in zip(keys.unbind(1), writes.states, strict=False)], dim=1)
    found.close(f"prediction of a write, {name}", predictions.squeeze(2), keys @ first + scores @ U, OUTPUTS)
    q = noise((len(keys), keys.shape[-1]), f"claims/dual query {name}")
    expected = torch.einsum("ri,ric->rc", q, last)
    found.close(f"read by logits of PaTH, {name}", linear_read(writes, q), expected, OUTPUTS)


def compare_gradients(found: Evidence, name: str, writes: Writes, eps: float) -> None:
    """Compares gradients of a chain of writes and of the sequence operator with respect to all inputs."""
    # Directions that are not unit vectors, so that gradients include their norm.
    leaves = [t.clone().requires_grad_() for t in (writes.states[0], 3 * writes.keys, writes.gates, writes.targets)]
    first, directions, gates, targets = leaves
    channels = first.unbind(-1)
    for time in range(writes.times):
        channels = delta_writes(channels, directions[:, time], targets[:, time].T, gates[:, time], eps)
    along_depth = torch.stack(channels, dim=-1)
    cotangent = noise(tuple(along_depth.shape), f"claims/dual cotangent {name}")
    expected = gradients_of([along_depth], [cotangent], leaves)
    for impl in ENGINES:
        over = over_depth(Writes((first,), unit(directions, eps), gates, targets), writes.times, impl)
        got = gradients_of([over], [cotangent], leaves)
        found.all_close(f"gradients, {name}, {impl}", got, expected, GRADIENTS)


def check_limits(found: Evidence) -> None:
    """Tests that the write-only form is no delta rule, and that keys depend on the first state."""
    control = captured(decoder(DeepDeltaConfig(value_target="paper", update_rule="write_only")))
    found.apart("state of the write-only form", over_depth(control, control.times, "reference"), control.states[-1], VISIBLE)
    model = decoder(DeepDeltaConfig(value_target="paper"))
    moved = trace(model, tokens(), {0: noise((*tokens().shape, D_MODEL), "claims/dual disturbance")})
    keys, other = (unit(run.updates[-1], 1e-5) for run in (trace(model, tokens()), moved))
    found.true("the last key depends on the first state", distance(keys, other) > VISIBLE)


CLAIM = Claim(
    number=11,
    title="Deep Delta Learning is the delta rule over depth",
    statement="Fix a token and let sublayers take the place of positions: the state of Deep Delta Learning with C channels is "
    "that of a delta-rule recurrence with one head, key width d, value width C, no decay, gates in (0, 2) and the embedding "
    "as its first state.",
    source=f"the transposed reading of {PAPER}, section 2.2, for the shortcut of arXiv:2601.00417v3, eq. 2.2; our derivation",
    tested="Keys, gates, targets and states captured from decoders with the mixer deep_delta, fed to the operator of the "
    "sequence mixer gated_delta_net: every state, closed forms, and gradients.",
    compute=compute,
)
