"""PaTH attention along positions: softmax scores between a query and a key that every token in between has reflected.

Letters: B batch, H heads, G kv-heads, R = H/G, T tokens, P tokens before them, K key width, V value width, N = B*G, C tokens of
a block, S keys before a block.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from twoaxis.core.errors import ConfigError
from twoaxis.ops.precision import Impl, check_impl, outside_autocast, refuse_second_gradients, runs_plain, statistics_dtype

LARGEST_BLOCK = 32
"""Tokens in a block of the fused engine: a longer one costs more inside, and fewer of them less between."""


class PathPast(NamedTuple):
    """Earlier tokens as the last of them left them, for the tokens that follow.

    Attributes:
        keys: reflected by every later token, in the precision of statistics, since each step rewrites all of them.
        values: as they were.
        forgotten: for each query head, the sum of the logarithms of later forget gates; None without these.
    """

    keys: Float[Tensor, "B G P K"]
    values: Float[Tensor, "B G P V"]
    forgotten: Float[Tensor, "B H P"] | None = None


@outside_autocast
def path_attention(
    q: Float[Tensor, "B H T K"],
    k: Float[Tensor, "B G T K"],
    v: Float[Tensor, "B G T V"],
    w: Float[Tensor, "B G T K"],
    beta: Float[Tensor, "B G T"],
    *,
    forget_log: Float[Tensor, "B H T"] | None = None,
    past: PathPast | None = None,
    documents: Int[Tensor, "B _"] | None = None,
    impl: Impl = "fused",
) -> tuple[Float[Tensor, "B H T V"], PathPast | None]:
    """Attends to earlier keys through a product of Householder-like reflections, one for each token in between.

    Equation: y_t = sum_(j<=t) softmax_j((q_t^T A_t A_(t-1) ... A_(j+1) k_j + sum_(s=j+1..t) f_s) / sqrt(K)) v_j,
              A_s = I - beta_s w_s w_s^T
    Source:   PaTH Attention, arXiv:2505.16381, eq. 1 to 5 and section 3.2 (blocks in UT form); the forget gate f as in the
              authors' kernel, inside the scale
    Shapes:   consecutive groups of H/G query heads share key, value and reflection; all but y in the precision of statistics
    Documents: a token sees the run of its own document that it stands in; one that returns to an earlier document starts anew
    Cost:     flops 2*(K+V) per head and visible pair, and the reflections: of a token on P earlier keys 4*K*P per kv-head. The
              fused engine reflects them once for a block of C <= 32 tokens, 2*K*K each, and saves its inputs alone: scores and
              weights of all pairs are computed again in the backward pass

    Args:
        q: queries.
        k: keys.
        v: values.
        w: directions of length 1.
        beta: strength of each reflection, from 0 to 2.
        forget_log: logarithm of the forget gate of each query head; None forgets nothing.
        past: earlier tokens, possibly none; None where nothing is to follow.
        documents: of the earlier and the new tokens; None when every row is one document.
        impl: `fused`, in blocks, or `reference`, token by token.

    Returns:
        The output, and the past of the next call if there is one here.

    Raises:
        ConfigError: documents for another number of tokens.
    """
    check_impl(impl)
    earlier = 0 if past is None else past.keys.shape[2]
    if documents is not None and documents.shape[1] != earlier + q.shape[2]:
        got = f"got documents of {documents.shape[1]} tokens for {earlier + q.shape[2]}"
        raise ConfigError(f"path_attention: {got}; give those of the earlier and of the new tokens")
    runs = None if documents is None else F.pad((documents[:, 1:] != documents[:, :-1]).cumsum(dim=1), (1, 0))
    inputs, keep = _Inputs(q, k, v, w, beta, forget_log, *(past or (None, None, None))), past is not None
    if not q.shape[2]:
        return _of_no_tokens(inputs), past
    # A single token is the recurrence itself.
    found: Any
    if impl == "reference" or q.shape[2] == 1:
        y, found = _computed(_recurrent, inputs, runs, keep)
    elif runs_plain(impl):
        y, found = _computed(_blocks, inputs, runs, keep)
    else:
        y, *found = _Recomputed.apply(runs, keep, *inputs)
    return y, PathPast(*found) if keep else None


class _Inputs(NamedTuple):
    """The inputs, and what there is of earlier tokens."""

    q: Tensor
    k: Tensor
    v: Tensor
    w: Tensor
    beta: Tensor
    forget_log: Tensor | None
    keys: Tensor | None
    values: Tensor | None
    forgotten: Tensor | None

    @property
    def past(self) -> PathPast:
        """The earlier tokens, possibly none."""
        if self.keys is None or self.values is None:
            forgotten = None if self.forget_log is None else self.forget_log[..., :0]
            return PathPast(self.k[:, :, :0], self.v[:, :, :0], forgotten)
        return PathPast(self.keys, self.values, self.forgotten)


Engine = Callable[[_Inputs, Tensor | None, bool], tuple[Tensor, PathPast | None]]


def _computed(engine: Engine, inputs: _Inputs, runs: Tensor | None, keep: bool) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """What an engine computes in the precision of statistics; output and values in the dtype of the values."""
    wide, dtype = statistics_dtype(inputs.v), inputs.v.dtype
    widened: Any = [x if x is None else x.to(wide) for x in inputs]
    y, past = engine(_Inputs(*widened), runs, keep)
    return y.to(dtype), () if past is None else past._replace(values=past.values.to(dtype))


class _Recomputed(torch.autograd.Function):
    """Saves the inputs alone, and computes scores and weights of all pairs once more in the backward pass."""

    @staticmethod
    def forward(ctx: Any, runs: Tensor | None, keep: bool, *inputs: Any) -> tuple[Tensor | None, ...]:
        ctx.save_for_backward(runs, *inputs)
        ctx.keep = keep
        y, past = _computed(_blocks, _Inputs(*inputs), runs, keep)
        return y, *past

    @staticmethod
    @outside_autocast
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_second_gradients("path_attention")
        runs, *inputs = ctx.saved_tensors
        leaves: list[Any] = [x if x is None else x.detach().requires_grad_() for x in inputs]
        with torch.enable_grad():
            y, past = _computed(_blocks, _Inputs(*leaves), runs, ctx.keep)
        made = [(out, grad) for out, grad in zip((y, *past), grad_outputs, strict=True) if out is not None and grad is not None]
        wanted: list[Tensor] = [x for x, needed in zip(leaves, ctx.needs_input_grad[2:], strict=True) if needed]
        outputs, cotangents = zip(*made, strict=True)
        found = iter(torch.autograd.grad(outputs, wanted, cotangents, allow_unused=True))
        return None, None, *(next(found) if needed else None for needed in ctx.needs_input_grad[2:])


def _of_no_tokens(inputs: _Inputs) -> Float[Tensor, "B H 0 V"]:
    """An engine needs a token, and gets one of zeros, whose output is left out."""
    new, past = inputs[:6], inputs[6:]
    one: Any = (*(x if x is None else F.pad(x, (0, 0) * (x.ndim - 3) + (0, 1)) for x in new), *past)
    y, _ = _computed(_blocks, _Inputs(*one), None, keep=False)
    return y[:, :, :0]


def _attend(scores: Tensor, seen: Tensor | None, values: Tensor) -> Float[Tensor, "B H T V"]:
    """Softmax over the scores of each head, and the sum of values of its kv-head."""
    if seen is not None:
        scores = scores.masked_fill(~seen, -torch.inf)
    weights = torch.softmax(scores, dim=-1)
    G = values.shape[1]
    # The query heads of one kv-head stand one below the other, so that values are never repeated.
    return (_grouped(weights, G) @ values).unflatten(2, (-1, scores.shape[2])).flatten(1, 2)


def _grouped(x: Float[Tensor, "B H T n"], G: int) -> Float[Tensor, "B G RT n"]:
    return x.unflatten(1, (G, -1)).flatten(2, 3)


def _recurrent(inputs: _Inputs, runs: Tensor | None, keep: bool) -> tuple[Float[Tensor, "B H T V"], PathPast | None]:
    """The equation token by token: every token reflects all earlier keys, then adds its own."""
    keys, values, forgotten = inputs.past
    scale, G, outputs = 1 / math.sqrt(inputs.q.shape[-1]), inputs.k.shape[1], []
    for t in range(inputs.q.shape[2]):
        q, k, v, w = (x[:, :, t : t + 1] for x in (inputs.q, inputs.k, inputs.v, inputs.w))
        moved = (keys @ w.transpose(-1, -2)) * inputs.beta[:, :, t, None, None]
        keys, values = torch.cat((keys - moved @ w, k), dim=2), torch.cat((values, v), dim=2)
        scores = (_grouped(q, G) @ keys.transpose(-1, -2)).flatten(1, 2).unsqueeze(2)
        if forgotten is not None and inputs.forget_log is not None:
            forgotten = F.pad(forgotten + inputs.forget_log[..., t : t + 1], (0, 1))
            scores = scores + forgotten.unsqueeze(2)
        seen = None if runs is None else (runs[:, : keys.shape[2]] == runs[:, keys.shape[2] - 1, None])[:, None, None]
        outputs.append(_attend(scores * scale, seen, values))
    return torch.cat(outputs, dim=2), PathPast(keys, values, forgotten) if keep else None


def _blocks(inputs: _Inputs, runs: Tensor | None, keep: bool) -> tuple[Float[Tensor, "B H T V"], PathPast | None]:
    """Reflects earlier keys once for each block; queries meet them where the block begins."""
    tokens, scale, G = inputs.q.shape[2], 1 / math.sqrt(inputs.q.shape[-1]), inputs.k.shape[1]
    n = -(-tokens // LARGEST_BLOCK)
    length = -(-tokens // n)
    added = n * length - tokens
    blocks = _Block.cut(inputs, n, added)
    keys, values, forgotten = inputs.past
    start, real, outputs = keys.shape[2], keys.shape[2] + tokens, []
    values = torch.cat((values, F.pad(inputs.v, (0, 0, 0, added))), dim=2)
    if runs is not None:
        runs = torch.cat((runs, runs[:, -1:].expand(-1, added)), dim=1)
    for at, block in enumerate(blocks):
        scores = torch.cat((_grouped(block.q, G) @ keys.transpose(-1, -2), _grouped(block.inside, G)), dim=-1)
        scores = scores.unflatten(2, (-1, length)).flatten(1, 2)
        if forgotten is not None:
            since = block.forgotten_at_start.unsqueeze(-1) + forgotten.unsqueeze(2)
            scores = scores + torch.cat((since, block.forgotten_inside), dim=-1)
        stop = start + length
        outputs.append(_attend(scores * scale, _seen(runs, start, stop, scores.device), values[:, :, :stop]))
        start = stop
        if keep or at + 1 < n:
            keys = torch.cat((keys @ block.reflected, block.k), dim=2)
            if forgotten is not None:
                total = forgotten + block.forgotten_at_start[..., -1:]
                forgotten = torch.cat((total, block.forgotten_inside[..., -1, :]), dim=-1)
    y = torch.cat(outputs, dim=2)[:, :, :tokens]
    if not keep:
        return y, None
    return y, PathPast(keys[:, :, :real], values[:, :, :real], None if forgotten is None else forgotten[..., :real])


def _seen(runs: Tensor | None, start: int, stop: int, device: torch.device) -> Tensor:
    """Which keys up to the end of a block its queries see."""
    index = torch.arange(stop, device=device)
    seen = index <= index[start:, None]
    if runs is None:
        return seen
    return seen & (runs[:, :stop].unsqueeze(1) == runs[:, start:stop].unsqueeze(2)).unsqueeze(1)


class _Block(NamedTuple):
    """One block of tokens, as a sum of rank-one matrices instead of a product of reflections.

    With W its directions, (I + L) U = diag(beta) W and L_ia = beta_i w_i^T w_a below the diagonal, the product of the first i
    reflections is I - sum_(a<=i) w_a U_a^T. That from behind token j on has X_j in the place of U: the same system, solved for
    W k_j without its rows up to j.

    Attributes:
        q: queries, moved to where the block begins.
        k: keys, moved to where it ends.
        inside: scores between its own tokens, before they are scaled.
        reflected: the transposed product of all its reflections.
        forgotten_at_start: sums of forget gates since its start; empty without these.
        forgotten_inside: the same between its own tokens.
    """

    q: Float[Tensor, "B H C K"]
    k: Float[Tensor, "B G C K"]
    inside: Float[Tensor, "B H C C"]
    reflected: Float[Tensor, "B G K K"]
    forgotten_at_start: Tensor
    forgotten_inside: Tensor

    @classmethod
    def cut(cls, inputs: _Inputs, n: int, added: int) -> list["_Block"]:
        """Solves n blocks of equal length; added tokens at the end reflect and forget nothing."""

        def rows_of_blocks(x: Tensor) -> Tensor:
            x = F.pad(x, (0, 0) * (x.ndim - 3) + (0, added)) if added else x
            return x.unflatten(2, (n, -1)).transpose(1, 2).flatten(0, 1)

        forget_log = None if inputs.forget_log is None else rows_of_blocks(inputs.forget_log)
        q, k, w, beta = map(rows_of_blocks, (inputs.q, inputs.k, inputs.w, inputs.beta))
        solved = cls.of(q, k, w, beta, forget_log)
        return [cls(*part) for part in zip(*(x.unflatten(0, (-1, n)).unbind(1) for x in solved), strict=True)]

    @classmethod
    def of(cls, q: Tensor, k: Tensor, w: Tensor, beta: Tensor, forget_log: Tensor | None) -> "_Block":
        """Solves blocks that are rows of a batch."""
        G, strength, turned = k.shape[1], beta.unsqueeze(-1), w.transpose(-1, -2)
        overlap = (w @ k.transpose(-1, -2)).tril(-1)
        # The solver reads below the diagonal only, and takes the diagonal as 1.
        solved = torch.linalg.solve_triangular(
            strength * (w @ turned), strength * torch.cat((overlap, w), dim=-1), upper=False, unitriangular=True
        )
        X, U = solved.split((k.shape[2], k.shape[3]), dim=-1)
        on_w = _grouped(((_grouped(q, G) @ turned).unflatten(2, (-1, q.shape[2])).flatten(1, 2)).tril(), G)
        inside = _grouped(q, G) @ k.transpose(-1, -2) - on_w @ X
        moved = _grouped(q, G) - on_w @ U
        eye = torch.eye(k.shape[3], dtype=k.dtype, device=k.device)
        ungrouped = [x.unflatten(2, (-1, q.shape[2])).flatten(1, 2) for x in (moved, inside)]
        return cls(
            ungrouped[0],
            k - X.transpose(-1, -2) @ w,
            ungrouped[1],
            eye - U.transpose(-1, -2) @ w,
            *((q[..., 0], q[..., 0]) if forget_log is None else _forgotten(forget_log)),
        )


def _forgotten(forget_log: Float[Tensor, "B H C"]) -> tuple[Float[Tensor, "B H C"], Float[Tensor, "B H C C"]]:
    """Sums over the tokens in between: the rounding of a difference of two sums would depend on other documents."""
    between = forget_log.unsqueeze(-1).expand(-1, -1, -1, forget_log.shape[-1]).tril(-1)
    return forget_log.cumsum(dim=-1), between.cumsum(dim=2)
