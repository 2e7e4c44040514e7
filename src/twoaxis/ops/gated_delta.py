"""The gated delta rule along positions: a state of fixed size that decays, and is overwritten along the key of each token.

Letters: B batch, H heads, T position, K key width, V value width, R documents given, C tokens of a chunk, N chunks of all
heads and rows.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from twoaxis.core.errors import ConfigError
from twoaxis.ops.precision import Impl, check_impl, outside_autocast, statistics_dtype

LARGEST_CHUNK = 64
"""Tokens in a chunk of the chunked engine; the work per token grows with the length of a chunk."""


@outside_autocast
def gated_delta(
    q: Float[Tensor, "B H T K"],
    k: Float[Tensor, "B H T K"],
    v: Float[Tensor, "B H T V"],
    decay_log: Float[Tensor, "B H T"],
    beta: Float[Tensor, "B H T"],
    *,
    state: Float[Tensor, "B H V K"] | None = None,
    documents: Int[Tensor, "B R"] | None = None,
    impl: Impl = "fused",
) -> tuple[Float[Tensor, "B H T V"], Float[Tensor, "B H V K"]]:
    """Writes every token to the state of its head, reads the state with its query, and returns reads and final state.

    Equation: S_t = a_t S_(t-1) (I - b_t k_t k_t^T) + b_t v_t k_t^T,  y_t = S_t q_t,  a = exp(decay_log)
    Source:   Gated Delta Networks, arXiv:2412.06464, eq. 10; products of many steps as in arXiv:2406.06484
    Deviates: where the document changes, S starts from zero, also where a row returns to an earlier document
    Shapes:   everything but y in the precision of statistics; y in the dtype of v, rounded once
    Cost:     flops 6*K*V per head and token. The fused engine runs matrix products of 2*(C*(2*K+V) + K*K + 3*K*V + K*K*V/C)
              per head and token, in chunks of C <= 64 tokens, and saves a few times C + K + V numbers for each

    Args:
        q: queries.
        k: keys of length 1.
        v: values.
        decay_log: natural logarithm of the factor that decays the state, at most 0.
        beta: the share of a key's old value that is replaced, from 0 to 1; up to 2, where it changes its sign.
        state: after earlier tokens; None is zero.
        documents: of the new tokens, with a state preceded by that of the last token before them; None when every row is one
            document.
        impl: `fused`, in chunks, or `reference`, token by token.

    Raises:
        ConfigError: documents for another number of tokens.

    Example:
        >>> key = torch.eye(2)[None, None]
        >>> y, state = gated_delta(key, key, torch.tensor([[[[3.0], [5.0]]]]), torch.zeros(1, 1, 2), torch.ones(1, 1, 2))
        >>> y.flatten(), state.flatten()
        (tensor([3., 5.]), tensor([3., 5.]))
    """
    check_impl(impl)
    runs = None if documents is None else _runs(documents, q.shape[2], state is not None)
    if not q.shape[2]:
        # Engines need a token: one of zeros neither decays nor writes.
        one = (F.pad(x, (0, 0) * (x.ndim - 3) + (0, 1)) for x in (q, k, v, decay_log, beta))
        y, last = gated_delta(*one, state=state, impl=impl)
        return y[:, :, :0], last
    wide = statistics_dtype(v)
    inputs = _Inputs(*(x.to(wide).flatten(0, 1) for x in (q, k, v, decay_log, beta)))
    if state is None:
        state = inputs.v.new_zeros(*q.shape[:2], v.shape[-1], q.shape[-1])
    # A single token is the recurrence itself. Chunks serve under torch.compile too, where loops would be unrolled.
    engine = _recurrent if impl == "reference" or q.shape[2] == 1 else _chunked
    y, last = engine(inputs, state.to(wide).flatten(0, 1), runs)
    return y.unflatten(0, q.shape[:2]).to(v.dtype), last.unflatten(0, q.shape[:2])


class _Inputs(NamedTuple):
    """The inputs with rows and heads as one first axis, in the precision of statistics."""

    q: Tensor
    k: Tensor
    v: Tensor
    decay_log: Tensor
    beta: Tensor


def _runs(documents: Tensor, tokens: int, after_state: bool) -> Int[Tensor, "B T"]:
    """Numbers the runs of equal documents; the state, if there is one, belongs to run 0."""
    if documents.shape[1] != tokens + after_state:
        given = "the new tokens, and of the one before them" if after_state else "the new tokens"
        raise ConfigError(f"gated_delta: got documents of {documents.shape[1]} tokens for {tokens}; give those of {given}")
    changes = (documents[:, 1:] != documents[:, :-1]).cumsum(dim=1)
    return changes if after_state else F.pad(changes, (1, 0))


def _recurrent(inputs: _Inputs, state: Tensor, runs: Tensor | None) -> tuple[Tensor, Tensor]:
    kept = inputs.decay_log.exp()
    if runs is not None:
        same = runs == F.pad(runs[:, :-1], (1, 0))
        kept = kept * same.repeat_interleave(kept.shape[0] // same.shape[0], dim=0)
    reads = []
    for t in range(inputs.q.shape[1]):
        q, k, v = (x[:, t].unsqueeze(-1) for x in inputs[:3])
        state = state * kept[:, t, None, None]
        error = v - torch.bmm(state, k)
        state = torch.baddbmm(state, inputs.beta[:, t, None, None] * error, k.transpose(1, 2))
        reads.append(torch.bmm(state, q).squeeze(-1))
    return torch.stack(reads, dim=1), state


def _chunked(inputs: _Inputs, state: Tensor, runs: Tensor | None) -> tuple[Tensor, Tensor]:
    """Solves each chunk for the writes of its tokens; only the state passes from chunk to chunk.

    With S at its start, c_i the decay since then, d_ij that from token j to i, e_j that until its end, and
    A_ij = b_i d_ij k_i^T k_j below the diagonal, a chunk writes n = (I + A)^-1 (b v - b c k S^T) = u - w S^T along its keys.
    So it ends in S (c_end I - w^T (e k)) + u^T (e k), and token i reads S (c_i q_i) + sum_(j<=i) d_ij (q_i^T k_j) n_j.
    """
    tokens, width, values = inputs.q.shape[1], inputs.k.shape[-1], inputs.v.shape[-1]
    n = -(-tokens // LARGEST_CHUNK)
    q, k, v, decay_log, beta = _Inputs(*(_cut(x, n) for x in inputs))
    decay = _decay(decay_log, None if runs is None else _cut_runs(runs, n, len(inputs.q)))
    beta, since, until = (x.unsqueeze(-1) for x in (beta, decay.since_start, decay.until_end))
    overlap = beta * decay.between * torch.bmm(k, k.transpose(1, 2))
    solved = torch.cat((beta * v, beta * since * k), dim=-1)
    # The solver reads below the diagonal only, and takes the diagonal as 1.
    solved = torch.linalg.solve_triangular(overlap, solved, upper=False, unitriangular=True)
    adds, loses = torch.bmm(solved.transpose(1, 2), until * k).split((values, width), dim=1)
    keeps = since[:, -1:] * torch.eye(width, dtype=k.dtype, device=k.device) - loses
    states = [state]
    for kept, added in zip(*(x.unflatten(0, (-1, n)).unbind(1) for x in (keeps, adds)), strict=True):
        states.append(torch.baddbmm(added, states[-1], kept))
    starts = torch.stack(states[:-1], dim=1).flatten(0, 1).transpose(1, 2)
    u, w = solved.split((values, width), dim=-1)
    erased, read = torch.bmm(torch.cat((w, since * q), dim=1), starts).chunk(2, dim=1)
    scores = decay.between * torch.bmm(q, k.transpose(1, 2))
    y = torch.baddbmm(read, scores, u - erased)
    return y.reshape(len(state), n * y.shape[1], values)[:, :tokens], states[-1]


class _Decay(NamedTuple):
    """The decay of the state between two tokens of a chunk; 0 where the document changes in between."""

    between: Float[Tensor, "N C C"]
    since_start: Float[Tensor, "N C"]
    until_end: Float[Tensor, "N C"]


def _decay(decay_log: Float[Tensor, "N C"], runs: tuple[Tensor, Tensor] | None) -> _Decay:
    """Sums over the tokens in between: the rounding of a difference of two sums would depend on other documents."""
    length = decay_log.shape[1]
    earlier = torch.ones(length, length, dtype=torch.bool, device=decay_log.device).tril()
    total = decay_log.unsqueeze(-1).expand(-1, -1, length).masked_fill(~earlier.tril(-1), 0.0).cumsum(dim=1)
    since_start = decay_log.cumsum(dim=1)
    seen = earlier
    if runs is not None:
        run, before = runs
        seen = earlier & (run.unsqueeze(-1) == run.unsqueeze(-2))
        since_start = since_start.masked_fill(run != before.unsqueeze(-1), -torch.inf)
    between = total.masked_fill(~seen, -torch.inf).exp()
    return _Decay(between, since_start.exp(), between[:, -1])


def _cut(x: Tensor, n: int) -> Tensor:
    """Cuts the tokens into n chunks of equal length; added tokens neither decay nor write."""
    length = -(-x.shape[1] // n)
    added = n * length - x.shape[1]
    if added:
        x = F.pad(x, (0, 0) * (x.ndim - 2) + (0, added))
    # Contiguous also where a view would do, so that the saved bytes do not depend on strides.
    return x.unflatten(1, (n, length)).flatten(0, 1).contiguous()


def _cut_runs(runs: Int[Tensor, "B T"], n: int, rows: int) -> tuple[Tensor, Tensor]:
    """The runs of the tokens of each chunk, and of the token before it; added tokens belong to the last run."""
    length = -(-runs.shape[1] // n)
    whole = torch.cat((runs, runs[:, -1:].expand(-1, n * length - runs.shape[1])), dim=1).unflatten(1, (n, length))
    before = F.pad(whole[:, :-1, -1], (1, 0))
    whole, before = (x.repeat_interleave(rows // len(runs), dim=0) for x in (whole, before))
    return whole.flatten(0, 1), before.flatten(0, 1)
