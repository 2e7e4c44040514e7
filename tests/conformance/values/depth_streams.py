"""Mixers along depth with several streams, fractions or value channels, and the delta rule over one.

Letters: D width, n streams, m fractions, P pieces, C value channels, k taps.
"""

import itertools
from typing import Any

import torch
from torch import Tensor

from .setting import EPS, Setting, context, layer, rms, weighted


def hyper_connections(s: Setting) -> Tensor:
    c, n, S = s.config, s.config.n_streams, [s.embeddings] * s.config.n_streams
    for g in range(s.stack.n_sublayers):
        p = s.mixer(g)
        a, b = list(p["read_weights"]), list(p["write_weights"])
        free = c.residual == "free"
        R: list[list[Any]] = [list(row) for row in (p["residual_weights"] if free else torch.eye(n, dtype=a[0].dtype))]
        for j in range(n if c.weights == "dynamic" else 0):
            score = _hyper_norm(c, p, S[j]) @ p["dynamic.maps"].T
            score = torch.tanh(score) if c.activation == "tanh" else score
            read, *residual, write = score.unsqueeze(-2).unbind(-1)
            a[j] = a[j] + p["dynamic.mixing_scale"] * read
            if free:
                R[j] = [old + p["dynamic.mixing_scale"] * new for old, new in zip(R[j], residual, strict=True)]
            assert free or not residual
            b[j] = b[j] + p["dynamic.write_scale"] * write
        y = s.f(g, weighted(a, S))
        S = [b[i] * y + weighted([R[j][i] for j in range(n)], S) for i in range(n)]
    return torch.stack(S).sum(0) / (n if c.read_out == "mean" else 1)


def _hyper_norm(c: Any, p: dict[str, Tensor], x: Tensor) -> Tensor:
    if c.norm == "rms_gain":
        return rms(x, 0.0) * p["dynamic.gain"]
    if c.norm == "rms":
        return rms(x, c.rms_eps)
    normed = layer(x, c.layer_eps)
    return normed * p["dynamic.gain"] + p["dynamic.bias"] if c.norm == "layer_affine" else normed


def frac_connections(s: Setting) -> Tensor:
    c, n, m, paper = s.config, s.config.n_streams, s.config.n_fractions, s.config.form == "paper"
    X = [piece for _ in range(n) for piece in s.embeddings.chunk(m, -1)]
    P = len(X)
    for g in range(s.stack.n_sublayers):
        p = s.mixer(g)
        mixes, identity = c.residual == "free", torch.eye(P, dtype=s.embeddings.dtype)
        Y, A = ([list(row) for row in x] for x in (p["read_weights"], p["residual_weights"] if mixes else identity))
        # B[g][i]: what fraction g of the update has in piece i; the paper gives every piece its own fraction alone.
        B: list[list[Any]] = [[p["write_weights"][i] * (not paper or i % m == g) for i in range(P)] for g in range(m)]
        for j in range(P if c.weights == "dynamic" else 0):
            unit = layer(X[j], 1e-5) if paper else rms(X[j], 0.0) * p["dynamic.gain"]
            scores = torch.tanh(unit @ p["dynamic.maps"].T).unsqueeze(-2).unbind(-1)
            mixing = [p["dynamic.mixing_scale"] * score for score in scores[: m + P * mixes]]
            writes = [p["dynamic.write_scale"] * score for score in scores[m + P * mixes :]]
            Y[j] = [old + new for old, new in zip(Y[j], mixing[:m], strict=True)]
            A[j] = [old + new for old, new in zip(A[j], mixing[m:], strict=True)] if mixes else A[j]
            # The scores of piece (stream, g) are those of the ways from fraction g of the update to this stream.
            stream, own = divmod(j, m)
            for f, write in enumerate(writes):
                i = j if paper else stream * m + f
                B[own][i] = B[own][i] + write
        u = torch.cat([weighted([Y[j][f] for j in range(P)], X) for f in range(m)], dim=-1)
        y = s.f(g, u).chunk(m, -1)
        X = [weighted([B[f][i] for f in range(m)], y) + weighted([A[j][i] for j in range(P)], X) for i in range(P)]
    return torch.stack([torch.cat(X[m * j : m * j + m], dim=-1) for j in range(n)]).sum(0)


V4: dict[str, Any] = dict(start="softmax", start_eps=1e-6, sum_eps=1e-6, read_eps=1e-6)
PRESETS: dict[str, dict[str, Any]] = {
    "paper": {},
    "deepseek_v4": V4 | dict(norm_eps=1e-6, read_out="learned"),
    "deepseek_v41": V4 | dict(norm_eps=1e-20, read="delayed", read_out="last_site"),
    "glm5": V4 | dict(norm_eps=1e-6, read_out="mean"),
    "lucidrains_v1": dict(scores="per_stream", order="sources_first", start="exp_minus_max"),
    "lucidrains_v2": dict(scores="per_stream", order="sources_first", start="exp_minus_max"),
    "hy_v4": dict(norm_eps=1e-6, residual="identity", read_eps=1e-6, write_eps=1e-6, read_out="learned"),
    "depthbench": dict(norm_eps=1e-8, coefficients="tanh", start="log"),
}
OF_THE_PAPER: dict[str, Any] = dict(scores="joint", norm_eps=1e-20, residual="sinkhorn", rounds=20, order="destinations_first")
OF_THE_PAPER |= dict(start="exp", start_eps=0.0, sum_eps=0.0, read_eps=0.0, write_eps=0.0, read_out="sum")
OF_THE_PAPER |= dict(coefficients="linear", read="current")


def mhc(s: Setting) -> Tensor:
    c, n = s.config, s.config.n_streams
    form = {name: getattr(c, name) for name in OF_THE_PAPER}
    form = OF_THE_PAPER | PRESETS[c.preset] | {name: value for name, value in form.items() if value is not None}
    S, before = [s.embeddings] * n, torch.eye(n, dtype=s.embeddings.dtype)[0]
    for g in range(s.stack.n_sublayers):
        a, b, residual = _logits(s.mixer(g), S, form)
        read = torch.sigmoid(a) + form["read_eps"]
        write = c.write_magnitude * torch.sigmoid(b) + form["write_eps"]
        used, before = (read, before) if form["read"] == "current" else (before, read)
        y = s.f(g, weighted(used.unsqueeze(-2).unbind(-1), S))
        kept = S
        if form["residual"] != "identity":
            R = stream_matrix(residual, form, n, s.mixer(g).get("angle_bounds")).unsqueeze(-3)
            kept = [weighted(R[..., i].unbind(-1), S) for i in range(n)]
        S = [w * y + x for w, x in zip(write.unsqueeze(-2).unbind(-1), kept, strict=True)]
    if form["read_out"] == "last_site":
        return weighted(before.unsqueeze(-2).unbind(-1), S)
    if form["read_out"] == "learned":
        p = s.ends
        z = rms(torch.cat(S, -1), form["norm_eps"]) @ p["fn"].T
        weights = torch.sigmoid(p["scale"] * z + p["base"]) + form["read_eps"]
        return weighted(weights.unsqueeze(-2).unbind(-1), S)
    return torch.stack(S).sum(0) / (n if form["read_out"] == "mean" else 1)


def _logits(p: dict[str, Tensor], S: list[Tensor], form: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """[B T n] of reads and of writes, and those of the matrix: [B T n n] by entry where each stream scores its own row."""
    n, bend = len(S), torch.tanh if form["coefficients"] == "tanh" else lambda z: z
    if form["scores"] == "joint":
        z = bend(rms(torch.cat(S, -1), form["norm_eps"]) @ p["fn"].T)
        m = n - 1
        rest = len(p["base"]) - 2 * n
        sizes = [n, n, m * (m - 1) // 2, m * (m - 1) // 2, m] if form["residual"] == "spectral" else [n, n, rest]
        sizes = [size for size in sizes if size]
        scale = torch.cat([one.expand(size) for one, size in zip(p["scale"], sizes, strict=True)])
        reads, writes, matrix = (scale * z + p["base"]).split([n, n, rest], dim=-1)
        return reads, writes, matrix
    rows = bend(torch.stack([rms(x, form["norm_eps"]) * p["gain"] @ p["fn"].T for x in S], dim=-2))
    sizes = [1, 1, n] if form["residual"] != "identity" else [1, 1]
    scale = torch.cat([one.expand(size) for one, size in zip(p["scale"], sizes, strict=True)])
    rows = scale * rows + p["base"]
    return rows[..., 0], rows[..., 1], rows[..., 2:].flatten(-2)


def stream_matrix(logits: Tensor, form: dict[str, Any], n: int, bounds: Tensor | None = None) -> Tensor:
    """[* n n] as [source, destination] from the logits [* rows]."""
    kind = form["residual"]
    if kind == "permutations":
        matrices = torch.stack([torch.eye(n, dtype=logits.dtype)[list(order)] for order in itertools.permutations(range(n))])
        return torch.einsum("...r,rji->...ji", torch.softmax(logits, -1), matrices)
    if kind == "kronecker":
        R = torch.ones(1, 1, dtype=logits.dtype)
        for pair in logits.split(2, -1):
            p = torch.sigmoid(pair[..., 0] - pair[..., 1])
            U = torch.stack((torch.stack((p, 1 - p), -1), torch.stack((1 - p, p), -1)), -2)
            R = torch.einsum("...ab,...cd->...acbd", R.expand(*p.shape, *R.shape[-2:]), U).flatten(-2).flatten(-3, -2)
        return R
    if kind == "spectral":
        return _spectral(logits, n, bounds)
    if kind == "orthogonal":
        one = torch.eye(4, dtype=logits.dtype)[0]
        p, q = (half / half.norm(dim=-1, keepdim=True) for half in (logits[..., :4] + one, logits[..., 4:] + one))
        basis = torch.eye(4, dtype=logits.dtype).expand(*p.shape[:-1], 4, 4)
        # Column c of the left matrix is p e_c, of the right one e_c q.
        left = torch.stack([_quaternions(p, e) for e in basis.unbind(-2)], -1)
        return left @ torch.stack([_quaternions(e, q) for e in basis.unbind(-2)], -1)
    entries = logits.unflatten(-1, (n, n))
    if kind == "sinkhorn":
        return doubly_stochastic(entries, form)
    return torch.softmax(entries, -2 if kind == "source_softmax" else -1)


def _spectral(logits: Tensor, n: int, bounds: Tensor | None) -> Tensor:
    m, one = n - 1, torch.eye(n - 1, dtype=logits.dtype)
    *angles, values = logits.split([m * (m - 1) // 2] * 2 + [m], -1)
    U, V = one, one
    if bounds is not None:
        turned = []
        for bound, some in zip(bounds, angles, strict=True):
            A = torch.zeros(*some.shape[:-1], m, m, dtype=logits.dtype)
            above = torch.triu_indices(m, m, 1)
            A[..., above[0], above[1]] = bound * torch.tanh(some)
            A = A - A.mT
            turned.append(torch.linalg.inv(one + A) @ (one - A))
        U, V = turned
    H = torch.zeros(n, m, dtype=logits.dtype)
    for i in range(1, n):
        H[:i, i - 1], H[i, i - 1] = 1 / (i * (i + 1)) ** 0.5, -i / (i * (i + 1)) ** 0.5
    return 1 / n + H @ (U * torch.tanh(values).unsqueeze(-2)) @ V.mT @ H.T


def _quaternions(p: Tensor, q: Tensor) -> Tensor:
    """The product of two quaternions."""
    (a, u), (b, v) = ((x[..., :1], x[..., 1:]) for x in (p, q))
    return torch.cat((a * b - (u * v).sum(-1, keepdim=True), a * v + b * u + torch.linalg.cross(u, v)), -1)


def doubly_stochastic(logits: Tensor, form: dict[str, Any]) -> Tensor:
    """The last two axes are source and destination; `destinations_first` first divides by the sum over destinations."""
    axes = [-1, -2] if form["order"] == "destinations_first" else [-2, -1]
    M = logits.exp()
    if form["start"] == "exp_minus_max":
        M = (logits - logits.max(axes[0], keepdim=True).values).exp()
    sums = axes * form["rounds"]
    if form["start"] == "softmax":
        # The first sum, without its eps.
        M, sums = M / M.sum(axes[0], keepdim=True), sums[1:]
    M = M + form["start_eps"]
    for axis in sums:
        M = M / (M.sum(axis, keepdim=True) + form["sum_eps"])
    return M


def two_lanes(s: Setting) -> Tensor:
    c, sites = s.config, s.stack.sites
    first = 2 * s.stack.n_blocks // 3 if c.first_block is None else c.first_block
    backout = first if c.backout_block is None else c.backout_block
    x0 = rms(s.embeddings, torch.finfo(torch.float64).eps)
    lanes = [x0 if c.embedding == "normalised_start" else s.embeddings] * 2
    kept = x0
    for site in sites:
        p = s.mixer(site.index)
        last = site.place > 0 and site.place == s.stack.block_lengths[site.block] - 1
        y = s.f(site.index, lanes[last])
        y = y if last else y + p["embedding_weight"] * x0
        write = p["write_weights"] if site.block >= first else p["write_weights"].expand(2)
        lanes = [p["lane_weight"] * lane + w * y for lane, w in zip(lanes, write, strict=True)]
        kept = lanes[0] if site.block == backout else kept
    return (lanes[0] + lanes[1]) / 2 - s.ends["backout_weight"] * kept


def gated_residual(s: Setting) -> Tensor:
    n, S = s.config.n_streams, [s.embeddings] * s.config.n_streams

    def read(p: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        y = [gain * rms(x, EPS) for gain, x in zip(p["gate.gain"], S, strict=True)]
        hidden = torch.cat(y, -1) @ p["gate.down"].T / n
        gates = torch.sigmoid((hidden * torch.sigmoid(hidden)) @ p["gate.up"].T).chunk(n, -1)
        return weighted(gates, y) / n, torch.cat(y, -1)

    for g in range(s.stack.n_sublayers):
        u, y = read(s.mixer(g))
        write = 2 * torch.sigmoid(y @ s.mixer(g)["gate.inject"].T / n)
        update = s.f(g, u)
        S = [x + w * update for x, w in zip(S, write.unsqueeze(-2).unbind(-1), strict=True)]
    return read(s.ends)[0]


def shifted(x: Tensor, steps: int) -> Tensor:
    """Every token in the place of the one so many steps later, zeros before the first one."""
    return torch.cat((torch.zeros_like(x[:, :steps]), x[:, : x.shape[1] - steps]), dim=1)


def convolved(x: Tensor, taps: Tensor) -> Tensor:
    """Taps [D k] of which the last is that of the current token."""
    k = taps.shape[1]
    return torch.stack([taps[:, k - 1 - back] * shifted(x, back) for back in range(min(k, x.shape[1]))]).sum(0)


def deep_delta(s: Setting) -> Tensor:
    c, C, X = s.config, s.config.value_channels, [s.embeddings] * s.config.value_channels
    if c.expansion == "embedding_conv":
        X = [convolved(s.embeddings, taps) for taps in s.ends["embedding_weight"].unbind(1)]
    first: dict[str, Tensor] = {}
    for site in s.stack.sites:
        p = s.mixer(site.index)
        first = p if site.place == 0 else first
        x = _compressed(c, first, "compressor", X)
        seen, update = context(x, s.stack.norm_eps), s.f(site.index, x)
        k = update / (update.square().sum(-1, keepdim=True) + c.direction_eps**2).sqrt()
        beta = 2 * torch.sigmoid(_gate(c, p, seen)).unsqueeze(-1)
        # One channel has a vector where several have a row each.
        v = (seen if c.value_target == "paper" else x) @ p["target_weight"].view(C, -1).T
        v = v if c.value_target == "paper" else v + p["target_bias"]
        v = 4 * torch.sigmoid(v) if c.value_target == "code" else v
        erased = [(k * y).sum(-1, keepdim=True) if c.update_rule == "delta" else 0.0 for y in X]
        written = [y + beta * k * (v[..., j : j + 1] - erased[j]) for j, y in enumerate(X)]
        if c.blend == "annealed":
            g = p["blend"]
            written = [X[0] + (1 - g) * update + g * (written[0] - X[0])]
        X = written
    return _compressed(c, s.ends, "readout", X)


def _gate(c: Any, p: dict[str, Tensor], seen: Tensor) -> Tensor:
    hidden = seen
    if c.gate != "linear":
        assert len(p["gate.hidden_weight"]) == c.gate_width
        hidden = torch.tanh(seen @ p["gate.hidden_weight"].T + (p["gate.hidden_bias"] if c.gate == "two_layer_bias" else 0.0))
    return hidden @ p["gate.weight"] + p["gate.bias"]


def _compressed(c: Any, p: dict[str, Tensor], name: str, X: list[Tensor]) -> Tensor:
    C = len(X)
    if c.compressor == "none":
        return X[0]
    weight, read = p[f"{name}.weight"], p[f"{name}.read_weight"]
    if c.compressor == "time":
        assert weight.shape[-1] == c.kernel_size
        return weighted(read, [convolved(x, weight[:, j]) for j, x in enumerate(X)])
    found = torch.zeros_like(X[0])
    for r in range(C):
        for j in range(C):
            if 0 <= (tap := j - r + (C - 1) // 2) < C:
                found = found + read[r] * weight[:, tap] * X[j]
    return found
