"""The decoder: embeddings, a stack of blocks on an explicit depth state, a final norm and a head.

Letters: B batch, T position, D width, V vocabulary.
"""

import operator
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, ClassVar, Protocol, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from twoaxis.core.errors import ConfigError, DataError, problem
from twoaxis.core.layout import TokenLayout
from twoaxis.core.parameters import DeclaredModule, Normal, initialise, materialize, matrix_std
from twoaxis.depth.base import build_stack
from twoaxis.local.places import mix_locally
from twoaxis.model.block import Block, RMSNorm, run_blocks
from twoaxis.model.cache import DecoderCache
from twoaxis.model.config import DecoderConfig
from twoaxis.ops.cpu.step_kernels import linear
from twoaxis.ops.cross_entropy import IGNORE, linear_cross_entropy


def check_token_ids(tokens: Int[Tensor, "*n"], vocab_size: int) -> None:
    """Checks ids of any shape.

    Raises:
        DataError: a token id outside the vocabulary.
    """
    if not tokens.numel():
        return
    for token in tokens.aminmax():
        _check_token_id(int(token), vocab_size)


def token_row(ids: Any, vocab_size: int) -> Int[Tensor, " T"]:
    """Returns the ids of a user as a tensor, checked: torch cuts fractions off, and fails on ids beyond 64 bits.

    Args:
        ids: a sequence, an array or a tensor.
        vocab_size: of the model or its tokenizer.

    Raises:
        DataError: anything but whole numbers, or a token id outside the vocabulary.
    """
    if isinstance(ids, Tensor) and ids.ndim == 1 and ids.dtype == torch.int64:
        check_token_ids(ids, vocab_size)
        return ids
    given = ids.tolist() if hasattr(ids, "tolist") else ids
    if not isinstance(given, Iterable):
        raise DataError(problem("token ids", given, "a list of whole numbers", "pass one list for each prompt"))
    row = []
    for token in given:
        try:
            row.append(operator.index(token))
        except TypeError:
            allowed = f"a whole number in 0..{vocab_size - 1}"
            raise DataError(f"token id={reprlib.repr(token)}: must be {allowed}; use the model's own tokenizer") from None
        _check_token_id(row[-1], vocab_size)
    return torch.tensor(row, dtype=torch.int64)


def _check_token_id(token: int, vocab_size: int) -> None:
    if not 0 <= token < vocab_size:
        raise DataError(problem("token id", token, f"in 0..{vocab_size - 1}", "use the model's own tokenizer"))


def check_id_tensor(what: str, ids: Any) -> None:
    """Checks that ids are a tensor of integers; `check_token_ids` checks their range.

    Raises:
        DataError: anything but a tensor of integers [batch, tokens].
    """
    if isinstance(ids, Tensor) and ids.ndim == 2 and ids.dtype in (torch.int64, torch.int32):
        return
    got = f"{str(ids.dtype).removeprefix('torch.')} {[*ids.shape]}" if isinstance(ids, Tensor) else type(ids).__name__
    raise DataError(f"{what}: got {got}; must be a tensor of int64 [batch, tokens]; pass torch.tensor([[1, 2, 3]])")


class TextTokenizer(Protocol):
    """Turns text into tokens and back, for `Decoder.generate`; every tokenizer of `twoaxis.data` does."""

    @property
    def vocab_size(self) -> int:
        """Ids are from 0 to vocab_size - 1."""
        ...

    @property
    def end_of_document(self) -> int | None:
        """The token that ends a text, where there is one."""
        ...

    def prompt(self, text: str) -> list[int]:
        """Encodes a text that is to be continued."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Decodes tokens."""
        ...


class Decoder(DeclaredModule):
    """A decoder-only Transformer built from a `DecoderConfig`; its parameters have initial values at once.

    Attributes:
        tokenizer: with it, `generate` takes and returns text; None until it is set, or the model loaded with one.
        end_tokens: tokens that end a row in `generate`, in addition to the end of a document.
        source_files: files of a published model that saving restores: chat template, tokenizer options, generation settings.

    Example:
        >>> config = DecoderConfig(vocab_size=16, d_model=8, n_layers=1)
        >>> Decoder.build(config, seed=0)(torch.tensor([[1, 2, 3]])).shape
        torch.Size([1, 3, 16])
    """

    block_class: ClassVar[type[Block]] = Block

    def __init__(self, config: DecoderConfig | Mapping[str, Any]) -> None:
        super().__init__()
        self.config = config = DecoderConfig.parse(config)
        self.tokenizer: TextTokenizer | None = None
        self.end_tokens: frozenset[int] = frozenset()
        self.source_files: Mapping[str, bytes] = {}
        shape, init = (config.vocab_size, config.d_model), Normal(config.initial_embedding_std)
        # To draw values on the meta device, as the constructor does, torch would load its compiler.
        self.embedding = nn.Embedding.from_pretrained(torch.empty(shape, device="meta"), freeze=False)
        self.embedding.weight = self.parameter("embedding.weight", shape, init, "embedding")
        stack, local = config.stack, config.embedding_local
        self.embedding_norm = RMSNorm(config.d_model, stack.norm_eps) if config.embedding_norm == "rms" else None
        self.embedding_local = local and local.build(config.d_model, stack.sites[0])
        mixers, ends = build_stack(config.depth, stack)
        stops = list(accumulate(stack.block_lengths, initial=0))
        self.blocks = nn.ModuleList(
            self.block_class(config.depth, mixers[start:stop], block, stack.sites[start:stop])
            for block, start, stop in zip(config.layers, stops, stops[1:], strict=False)
        )
        self.ends = ends
        self.norm = RMSNorm(config.d_model, stack.norm_eps, config.logit_scale)
        std = matrix_std(config.base_d_model or config.d_model)
        self.head = None if config.tie_embeddings else self.linear("head", config.d_model, config.vocab_size, std, tag="head")

    @staticmethod
    def build(config: DecoderConfig | Mapping[str, Any], seed: int = 0) -> "Decoder":
        """Builds a decoder and sets every parameter to its initial value for this seed; no generator but its own is used."""
        model = materialize(lambda: Decoder(config))
        initialise(model, seed)
        return model

    @staticmethod
    def from_pretrained(path: Path | str) -> "Decoder":
        """Reads a model as `twoaxis.load` does."""
        from twoaxis.api import load

        return load(path)

    def save(self, path: Path | str) -> Path:
        """Writes the model, and its tokenizer where it has one, into a new folder that `twoaxis.load` reads."""
        from twoaxis.api import save

        return save(self, path)

    def save_pretrained(self, path: Path | str) -> Path:
        """Writes the same and the tokenizer files of transformers; needs the extra `twoaxis[hf]`."""
        from twoaxis.api import save_pretrained

        return save_pretrained(self, path)

    def generate(self, prompts: Any, max_new_tokens: int = 100, **options: Any) -> Any:
        """Continues one prompt or several: token ids, or text where the model has a tokenizer.

        Args:
            prompts: a text, a list of texts, a list of token ids, or a list of such lists; also a tensor of ids.
            max_new_tokens: new tokens per row.
            options: as in `twoaxis.generate`; or `temperature`, `top_k`, `top_p` and `seed` of a `Sampling` themselves.

        Returns:
            The new text or tokens, in the form of the prompts: a text, a list of texts, a list of ids, or a list of such lists.

        Raises:
            ConfigError: text without a tokenizer, or an unknown option; more in `twoaxis.generate`.
            DataError: as in `twoaxis.generate`.

        Example:
            >>> model = Decoder.build({"vocab_size": 8, "d_model": 8, "n_layers": 1})
            >>> len(model.generate([1, 2, 3], 5)), [len(row) for row in model.generate([[1, 2], [3]], 4, temperature=1.0)]
            (5, [4, 4])
        """
        from twoaxis.model.generate import continue_prompts

        return continue_prompts(self, prompts, max_new_tokens, options)

    @property
    def head_weight(self) -> Float[Tensor, "V D"]:
        """The output matrix: the embedding when tied."""
        return self.embedding.weight if self.head is None else self.head.weight

    def new_cache(self) -> DecoderCache:
        """The cache before the first token."""
        embedding = self.embedding_local and self.embedding_local.new_cache()
        return DecoderCache(tuple(cast(Block, block).new_caches() for block in self.blocks), (), embedding=embedding)

    def embed(self, tokens: Int[Tensor, "B T"]) -> Float[Tensor, "B T D"]:
        """Looks up token embeddings, and applies the embedding norm if there is one.

        Raises:
            DataError: anything but a tensor of integers [B T], or a token id outside the vocabulary.
        """
        check_id_tensor("tokens", tokens)
        # On a GPU the lookup itself raises, and reading the range would stall the device at every step.
        if not torch.compiler.is_compiling() and tokens.device.type == "cpu":
            check_token_ids(tokens, self.config.vocab_size)
        return self.normalise_embeddings(self.embedding(tokens))

    def normalise_embeddings(self, vectors: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        """Applies the embedding norm, if there is one, to looked-up vectors or to vectors in their place."""
        return vectors if self.embedding_norm is None else self.embedding_norm(vectors)

    def mix_embeddings(
        self, embeddings: Float[Tensor, "B T D"], layout: TokenLayout, cache: Any = None
    ) -> tuple[Float[Tensor, "B T D"], Any]:
        """Replaces padding with zeros, and applies the local mixer behind the embedding; returns its next cache.

        Zeros once for all mixers: the gradient of a weight multiplies its input, and 0 * NaN is NaN.
        """
        return mix_locally(self.embedding_local, layout.without_padding(embeddings), layout, cache)

    def hidden(
        self,
        embeddings: Float[Tensor, "B T D"],
        layout: TokenLayout | None = None,
        cache: DecoderCache | None = None,
        recompute: bool = False,
        tokens: Int[Tensor, "B T"] | None = None,
    ) -> tuple[Float[Tensor, "B T D"], DecoderCache | None]:
        """Runs the stack and the final norm.

        Args:
            embeddings: as `embed` or `normalise_embeddings` returns them; those of padding tokens are replaced by zeros.
            layout: positions and documents; None means that rows are one document each, continued from the cache.
            cache: returned by the last call, or `new_cache()`; None runs without one.
            recompute: keep only the depth state between blocks and recompute the rest in the backward pass.
            tokens: the ids of the embeddings, for mixers with a table of tokens.
        """
        layout = self._layout(embeddings, layout, cache).of(tokens)
        embeddings, embedding = self.mix_embeddings(embeddings, layout, None if cache is None else cache.embedding)
        state, ends = self.ends.enter(embeddings, layout, None if cache is None else cache.ends)
        next_caches = []
        if cache is None:
            state = run_blocks(self.blocks, state, layout, recompute)
        else:
            for block, given in zip(self.blocks, cache.sublayers, strict=True):
                state, caches = block(state, layout, given)
                next_caches.append(tuple(caches))
        left, ends = self.ends.leave(state, layout, ends)
        return self.norm(left), None if cache is None else cache.next_cache(tuple(next_caches), ends, layout, embedding)

    def forward(
        self, tokens: Int[Tensor, "B T"], layout: TokenLayout | None = None, cache: DecoderCache | None = None
    ) -> Float[Tensor, "B T V"] | tuple[Float[Tensor, "B T V"], DecoderCache]:
        """Returns logits, and the next cache when one is given."""
        hidden, next_cache = self.hidden(self.embed(tokens), layout, cache, tokens=tokens)
        logits = self.logits(hidden)
        return logits if next_cache is None else (logits, next_cache)

    def logits(self, hidden: Float[Tensor, "*n D"]) -> Float[Tensor, "*n V"]:
        """Scores every token of the vocabulary."""
        return linear(hidden, self.head_weight)

    def loss(
        self,
        tokens: Int[Tensor, "B T"],
        targets: Int[Tensor, "B T"],
        layout: TokenLayout | None = None,
        recompute: bool = False,
    ) -> tuple[Float[Tensor, ""], Int[Tensor, ""]]:
        """Returns the sum of token losses in nats and the number of tokens that carry one.

        Raises:
            DataError: targets that are not one token id for each token, or `IGNORE` for none.
        """
        check_id_tensor("targets", targets)
        if targets.shape != tokens.shape:
            raise DataError(
                problem("shape of targets", [*targets.shape], f"{[*tokens.shape]}, that of tokens", "pass one each")
            )
        hidden, _ = self.hidden(self.embed(tokens), layout, recompute=recompute, tokens=tokens)
        total = linear_cross_entropy(hidden.flatten(0, 1), self.head_weight, targets.flatten())
        return total, (targets != IGNORE).sum()

    @torch.no_grad()
    def correct(
        self, tokens: Int[Tensor, "B T"], targets: Int[Tensor, "B T"], layout: TokenLayout | None = None
    ) -> Int[Tensor, ""]:
        """Returns the number of targets that are the most likely token; those that are `IGNORE` do not count."""
        hidden, _ = self.hidden(self.embed(tokens), layout, tokens=tokens)
        valid = targets != IGNORE
        return (self.logits(hidden[valid]).argmax(-1) == targets[valid]).sum()

    def _layout(self, embeddings: Tensor, layout: TokenLayout | None, cache: DecoderCache | None) -> TokenLayout:
        tokens = embeddings.shape[1]
        if layout is not None and layout.positions.shape[1] != tokens:
            raise ConfigError(
                problem("layout", layout.positions.shape[1], f"as long as the {tokens} tokens", "pass one position each")
            )
        if cache is not None:
            if cache.length + tokens > self.config.max_seq_len and layout is None:
                got = cache.length + tokens
                raise ConfigError(
                    problem("tokens", got, f"at most max_seq_len={self.config.max_seq_len}", "raise it or generate less")
                )
            return cache.layout(tokens, embeddings.device) if layout is None else cache.place(layout)
        if layout is None:
            if tokens > self.config.max_seq_len:
                raise ConfigError(
                    problem("tokens", tokens, f"at most max_seq_len={self.config.max_seq_len}", "raise it or cut the text")
                )
            return TokenLayout.contiguous(tokens, device=embeddings.device)
        return layout.after(None)
