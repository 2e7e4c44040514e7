"""Generation with caches: ragged prompts, chunked prefill, one step per token, sampled from logits.

Letters: B batch, T position, V vocabulary.
"""

import inspect
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float, Int
from pydantic import Field
from torch import Tensor, nn

from twoaxis.core.config import Config
from twoaxis.core.errors import ConfigError, DataError, nearest, problem
from twoaxis.core.layout import TokenLayout
from twoaxis.model.decoder import Decoder, token_row
from twoaxis.model.static_cache import StaticSteps, check_compiler, histories_are_full
from twoaxis.ops.cpu import library, step_kernels


@contextmanager
def column_major_weights(model: Decoder, compiled_rows: int | None = None) -> Iterator[None]:
    """Stores weight matrices in column-major order inside the context; values and parameter objects stay the same.

    A step of generation multiplies every matrix with one vector per row of the batch. With one row, BLAS is up to three
    times faster when the weights of consecutive outputs are adjacent in memory. On a GPU nothing changes.

    Args:
        model: the decoder.
        compiled_rows: rows of the steps if these are compiled; weights that their kernel in C reads stay as they are.
    """
    candidates = [*(module.weight for module in model.modules() if isinstance(module, nn.Linear)), model.head_weight]
    weights = [weight for weight in candidates if weight.device.type == "cpu" and weight.is_contiguous()]
    if compiled_rows is not None and library.served():
        weights = [weight for weight in weights if not step_kernels.takes_few_rows(compiled_rows, weight)]
    # Not as inference tensors, which could not be trained afterwards.
    with torch.inference_mode(False):
        for weight in weights:
            weight.data = weight.data.T.contiguous().T
    try:
        yield
    finally:
        with torch.inference_mode(False):
            for weight in weights:
                weight.data = weight.data.contiguous()


SMALLEST_TEMPERATURE = 1e-6
"""Smaller temperatures take the most likely token: dividing by them would magnify rounding of the logits, or overflow."""

SEEDS = 2**64
"""Number of seeds of a generator; negative ones count from the end."""


class Sampling(Config):
    """Greedy decoding at temperature 0, else sampling from the tempered, truncated distribution.

    Args:
        temperature: divides the logits; 0, as anything below 1e-6, takes the most likely token.
        top_k: keep this many of the most likely tokens; None keeps all.
        top_p: keep the smallest set of most likely tokens whose probability reaches this; 1 keeps all.
        seed: of the random draws, from -2**63 to 2**64 - 1; row i of a batch draws with `seed + i`.

    Example:
        >>> Sampling(temperature=0.8, top_k=50).top_p
        1.0
    """

    temperature: float = Field(default=0.0, ge=0)
    top_k: int | None = Field(default=None, ge=1)
    top_p: float = Field(default=1.0, gt=0, le=1)
    seed: int = Field(default=0, ge=-(SEEDS // 2), lt=SEEDS)

    def generator(self, row: int = 0) -> torch.Generator:
        """Returns a new generator of random numbers: row `row` draws as a single row with `seed + row` would."""
        return torch.Generator().manual_seed((self.seed + row) % SEEDS)

    def choose(self, logits: Float[Tensor, "B V"], generators: Sequence[torch.Generator]) -> Int[Tensor, " B"]:
        """Chooses one token per row.

        Args:
            logits: of all tokens that may be chosen.
            generators: one per row, so that the draws of a row do not depend on other rows.

        Raises:
            DataError: logits that are NaN or infinite.
        """
        if self.temperature < SMALLEST_TEMPERATURE:
            return _numbers(logits).argmax(-1)
        probabilities = torch.softmax(self.truncate(_numbers(logits.float() / self.temperature)), dim=-1)
        # Drawn on the CPU, so that a seed means the same tokens on every device; as `torch.multinomial` draws one for each row.
        probabilities = probabilities.cpu()
        noise = torch.empty_like(probabilities)
        for row, generator in zip(noise.unbind(), generators, strict=True):
            row.exponential_(generator=generator)
        return (probabilities / noise).argmax(-1).to(logits.device)

    def truncate(self, logits: Float[Tensor, "B V"]) -> Float[Tensor, "B V"]:
        """Sets the logits outside top-k and top-p to minus infinity; the most likely token always stays."""
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            smallest = logits.topk(self.top_k, dim=-1).values[..., -1:]
            logits = logits.masked_fill(logits < smallest, -torch.inf)
        if self.top_p < 1:
            ordered, order = logits.sort(dim=-1, descending=True)
            probabilities = ordered.softmax(-1)
            beyond = probabilities.cumsum(-1) - probabilities >= self.top_p
            # A top_p that rounds to 0 would drop it too.
            beyond[..., 0] = False
            logits = logits.masked_fill(torch.empty_like(beyond).scatter_(-1, order, beyond), -torch.inf)
        return logits


def _numbers(logits: Float[Tensor, "B V"]) -> Float[Tensor, "B V"]:
    # The largest is not finite where any is NaN or infinite, or where none can be chosen.
    if not logits.amax(-1).isfinite().all():
        raise DataError("logits: got infinite ones or NaN: must be numbers; generate with a model that has not diverged")
    return logits


GREEDY = Sampling()

NO_PROMPTS = "prompts: must be a text, token ids, or a list of either; give whole numbers for ids"

WORTH_A_LAYOUT_TOKENS = 16
"""Number of new tokens from which on the column-major layout saves more time than the change of layout takes."""


def generate(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: Sampling = GREEDY,
    stop_token: int | Collection[int] | None = None,
    prefill_chunk_tokens: int | None = None,
    vocab_size: int | None = None,
    compile: bool = False,
) -> list[list[int]]:
    """Continues each prompt; the result of a row does not depend on the other rows or their lengths.

    When sampling, row i draws as its prompt alone would with `seed + i`, so that equal prompts get different continuations.

    Args:
        model: the decoder.
        prompts: token ids, one sequence per row, of any lengths from 1.
        max_new_tokens: new tokens per row.
        sampling: how tokens are chosen; greedy by default.
        stop_token: a row ends before this token, or before any of these.
        prefill_chunk_tokens: process prompts in pieces of this length, to bound memory; None takes them whole.
        vocab_size: only ids below it are chosen: the size of the tokenizer, where the vocabulary of the model is padded
            beyond that; None allows all.
        compile: compile the step from one token to the next, once for each number of rows and each 256 tokens of room; needs a
            C++ compiler, or a GPU. It pays for many tokens.

    Returns:
        The new tokens of each row.

    Raises:
        DataError: no prompt, an empty prompt, a token id that is no whole number of the vocabulary, or logits that are NaN or
            infinite.
        ConfigError: a chunk or a number of tokens below 1, more tokens than max_seq_len, or no compiler where one is needed.

    Example:
        >>> from twoaxis import DecoderConfig
        >>> model = Decoder.build(DecoderConfig(vocab_size=8, d_model=8, n_layers=1))
        >>> [len(new) for new in generate(model, [[1, 2, 3], [4]], max_new_tokens=5)]
        [5, 5]
    """
    results: list[list[int]] = [[] for _ in prompts]
    finished = [False] * len(prompts)
    stops = frozenset(stop_token) if isinstance(stop_token, Collection) else {stop_token}
    for tokens in stream(model, prompts, max_new_tokens, sampling, prefill_chunk_tokens, vocab_size, compile=compile):
        for row, token in enumerate(tokens):
            finished[row] = finished[row] or token in stops
            if not finished[row]:
                results[row].append(token)
        if all(finished):
            break
    return results


def continue_prompts(model: Decoder, prompts: Any, max_new_tokens: int, options: dict[str, Any]) -> Any:
    """Continues one prompt or several, in text or in tokens; see `Decoder.generate`."""
    tokenizer = model.tokenizer
    single, rows = _rows_of(prompts)
    texts = bool(rows) and isinstance(rows[0], str)
    if texts and tokenizer is None:
        raise ConfigError(problem("prompts", rows[0], "token ids, since the model has no tokenizer", "set model.tokenizer"))
    if tokenizer is not None:
        end = set() if tokenizer.end_of_document is None else {tokenizer.end_of_document}
        options = {"stop_token": model.end_tokens | end, "vocab_size": tokenizer.vocab_size, **options}
        rows = [tokenizer.prompt(row) for row in rows] if texts else rows
    new = generate(model, rows, max_new_tokens, **_with_sampling(options))
    results = [tokenizer.decode(row) for row in new] if texts and tokenizer is not None else new
    return results[0] if single else results


def _rows_of(prompts: Any) -> tuple[bool, list[Any]]:
    """Returns whether there is one prompt, and all prompts, either texts or rows of ids."""
    prompts = prompts.tolist() if hasattr(prompts, "tolist") else prompts
    try:
        # Numbers, also those of numpy and torch, have no axes.
        single = isinstance(prompts, str) or (
            len(prompts) > 0 and not isinstance(prompts[0], str | Sequence) and getattr(prompts[0], "ndim", 0) == 0
        )
        rows: list[Any] = [prompts] if single else list(prompts)
    except TypeError:
        raise DataError(NO_PROMPTS) from None
    if len({isinstance(row, str) for row in rows}) > 1:
        raise DataError(NO_PROMPTS)
    return single, rows


def _with_sampling(options: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of `generate`, with sampling options collected in one `Sampling`."""
    own = {name: value for name, value in options.items() if name in Sampling.model_fields}
    others = {name: value for name, value in options.items() if name not in own}
    known = [*inspect.signature(generate).parameters][3:]
    if unknown := [name for name in others if name not in known]:
        remedy = nearest(unknown[0], (*known, *Sampling.model_fields))
        raise ConfigError(f"generate: unknown keyword {unknown[0]!r}; {remedy}")
    sampling = Sampling.parse(others.pop("sampling", None) or {})
    return {**others, "sampling": sampling.replace(**own)}


def stream(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: Sampling = GREEDY,
    prefill_chunk_tokens: int | None = None,
    vocab_size: int | None = None,
    generators: Sequence[torch.Generator] | None = None,
    compile: bool = False,
) -> Iterator[list[int]]:
    """Yields the next token of every row, `max_new_tokens` times; arguments and errors as in `generate`.

    Row i draws from `generators[i]`; None makes those of `generate`.
    """
    tokens, layout = _left_pad(model, prompts)
    _check(model, tokens.shape[1], max_new_tokens, prefill_chunk_tokens, vocab_size)
    if compile:
        check_compiler(tokens.device)
    draws = [sampling.generator(row) for row in range(len(prompts))] if generators is None else generators

    def choose(hidden: Float[Tensor, "B T D"]) -> Int[Tensor, " B"]:
        return sampling.choose(model.logits(hidden[:, -1])[:, :vocab_size], draws)

    chunk = prefill_chunk_tokens or tokens.shape[1]
    steps = _steps(model, tokens, layout, max_new_tokens, choose, chunk, compile)
    compiled_rows = len(tokens) if compile else None
    return steps if max_new_tokens < WORTH_A_LAYOUT_TOKENS else _in_decode_layout(model, steps, compiled_rows)


def _in_decode_layout(model: Decoder, steps: Iterator[list[int]], compiled_rows: int | None) -> Iterator[list[int]]:
    with column_major_weights(model, compiled_rows):
        yield from steps


def _steps(
    model: Decoder,
    tokens: Tensor,
    layout: TokenLayout | None,
    max_new_tokens: int,
    choose: Callable[[Tensor], Tensor],
    chunk: int,
    compile: bool,
) -> Iterator[list[int]]:
    cache: Any = model.new_cache()
    if max_new_tokens == 0:
        return
    # A compiled program takes no tensors of inference mode.
    without_gradients = torch.no_grad if compile else torch.inference_mode
    with without_gradients():
        hidden = torch.empty(0)
        for start in range(0, tokens.shape[1], chunk):
            part = None if layout is None else layout.part(start, start + chunk)
            given = tokens[:, start : start + chunk]
            hidden, cache = model.hidden(model.embed(given), part, cache, tokens=given)
        chosen = choose(hidden)
    yield chosen.tolist()
    static = None
    for _ in range(max_new_tokens - 1):
        # Entered again at each step, so that a consumer of the iterator never runs in this mode.
        with without_gradients():
            given = chosen[:, None]
            if static is not None:
                hidden = static.hidden(given)
            else:
                before = cache
                hidden, cache = model.hidden(model.embed(given), None, cache, tokens=given)
                if compile and histories_are_full(before, cache):
                    static = StaticSteps(model, cache, len(tokens), tokens.shape[1] + max_new_tokens)
            chosen = choose(hidden)
        yield chosen.tolist()


def _left_pad(model: Decoder, prompts: Sequence[Any]) -> tuple[Int[Tensor, "B T"], TokenLayout | None]:
    rows = [token_row(prompt, model.config.vocab_size) for prompt in prompts]
    lengths = [len(row) for row in rows]
    if not lengths or min(lengths) == 0:
        got = "no prompts" if not lengths else f"prompt {lengths.index(0)} without tokens"
        raise DataError(
            f"prompts: got {got}: must be at least one, each of at least one token; begin with an end-of-document token"
        )
    longest, device = max(lengths), model.embedding.weight.device
    tokens = torch.zeros(len(rows), longest, dtype=torch.long)
    for padded, row in zip(tokens, rows, strict=True):
        padded[longest - len(row) :] = row
    if min(lengths) == longest:
        return tokens.to(device), None
    return tokens.to(device), TokenLayout.left_padded(torch.tensor(lengths, device=device), longest)


def _check(model: Decoder, prompt_tokens: int, new_tokens: int, chunk: int | None, vocab_size: int | None) -> None:
    if vocab_size is not None and vocab_size < 1:
        raise ConfigError(problem("vocab_size", vocab_size, ">= 1", "give the vocab_size of the tokenizer"))
    if chunk is not None and chunk < 1:
        raise ConfigError(problem("prefill_chunk_tokens", chunk, ">= 1", "leave it out to take the prompt whole"))
    if new_tokens < 0:
        raise ConfigError(problem("max_new_tokens", new_tokens, ">= 0", "ask for at least one token"))
    limit = model.config.max_seq_len
    if prompt_tokens + new_tokens > limit:
        got = prompt_tokens + new_tokens
        raise ConfigError(
            problem("prompt and new tokens", got, f"at most max_seq_len={limit}", "shorten the prompt or ask for fewer")
        )
