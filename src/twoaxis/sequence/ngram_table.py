"""Tables whose rows are found by hashes of the last tokens, with the history of ids that generation carries.

Letters: B batch, T position, P cached ids, R cached and new ones, N longest n-gram, C tables, W width of a row.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple, Self

import torch
from jaxtyping import Float, Int
from pydantic import Field, model_validator
from torch import Tensor

from twoaxis.core.config import Config
from twoaxis.core.errors import ConfigError, problem
from twoaxis.core.layout import PADDING, TokenLayout
from twoaxis.core.parameters import Constant, DeclaredModule
from twoaxis.core.position import SublayerPosition
from twoaxis.ops.ngram_gate import table_rows
from twoaxis.ops.ngram_hash import LARGEST_ID, NOTHING, HashKind, RowHash, Wanted, token_window

LR_SCALE = 5.0
"""Factor on the learning rate of a table, each of whose rows has a gradient in few steps; that of arXiv:2601.07372."""

Rows = Annotated[int, Field(ge=2, le=2**31 - 1)]
Ids = tuple[Annotated[int, Field(ge=0, lt=LARGEST_ID)], ...]


class TableOptions(Config):
    """The options of hashed tables, which `NgramEmbeddingConfig` describes."""

    hash: HashKind = "pcg64"
    order: int = Field(default=3, ge=2, le=16)
    heads: int = Field(default=2, ge=1, le=64)
    rows: tuple[Rows, ...] = (1021,)
    row_multiple: int = Field(default=1, ge=1, le=2**20)
    row_width: int | None = Field(default=12, ge=1, le=2**20)
    seed: int = Field(default=0, ge=0, lt=2**62)
    hash_vocab: int | None = Field(default=None, ge=1, le=LARGEST_ID)
    compression: Ids | None = None
    fill_id: int = Field(default=0, ge=0, lt=LARGEST_ID)
    end_ids: Ids = ()
    blank_ids: Ids = ()
    untrained_row: int | None = Field(default=None, ge=0)
    document_reset: Literal["both", "hash_only", "none"] = "both"

    @model_validator(mode="before")
    @classmethod
    def _records_vocabulary(cls, data: Any) -> Any:
        table: Any = data.get("compression") if isinstance(data, Mapping) else None
        numbers = isinstance(table, list | tuple) and bool(table) and all(type(one) is int for one in table)
        if not numbers or data.get("hash_vocab") is not None:
            return data
        # Beside the table, so that a record in which one of them was changed is refused.
        return {**data, "hash_vocab": max(table) + 1}

    @model_validator(mode="after")
    def _tables_fit(self) -> Self:
        if len(self.rows) not in (1, self.order - 1):
            raise ConfigError(
                problem("rows", self.rows, f"one number, or one for each length of 2..{self.order}", "correct it")
            )
        if self.hash == "int32" and (self.order, self.heads) != (2, 1):
            got = f"order={self.order} and heads={self.heads}"
            raise ConfigError(f"hash='int32' with {got}: must have order=2 and heads=1; set them, or use another hash")
        if self.hash == "polynomial" and (self.fill_id, 0 in self.blank_ids) != (0, True):
            raise ConfigError("hash='polynomial': must have fill_id=0 and 0 in blank_ids, its id of no token; correct them")
        if (table := self.compression) is None:
            return self
        if not table or set(table) != set(range(max(table) + 1)):
            remedy = "make it with twoaxis.data.compressed_ids"
            raise ConfigError(f"compression of {len(table)} ids: must be new ids from 0 on without a gap; {remedy}")
        if self.hash_vocab != max(table) + 1:
            remedy = "leave it out, or take the table of the tokenizer that the model was trained with"
            raise ConfigError(problem("hash_vocab", self.hash_vocab, f"{max(table) + 1}, the ids of compression", remedy))
        return self

    @property
    def wanted(self) -> Wanted:
        """The smallest number of rows of a table, and the number of tables, for each length."""
        each = self.rows if len(self.rows) > 1 else self.rows * (self.order - 1)
        return tuple((rows, self.heads) for rows in each)

    @property
    def hashed(self) -> Wanted:
        """The tables that need primes of their own."""
        return self.wanted if self.hash in ("pcg64", "splitmix64") else ()

    def recorded_for(self, vocab_size: int) -> Self:
        """With `hash_vocab`, which a hash depends on; a vocabulary of one token stands for one not known yet."""
        if self.hash_vocab is not None or self.hash == "int32" or vocab_size == 1:
            return self
        return self.replace(hash_vocab=vocab_size)

    def check_vocabulary(self, ids: int | None) -> None:
        """Checks a vocabulary; one of a single token stands for one not known yet.

        Raises:
            ConfigError: more tokens than `compression` has, or options that name none of them.
        """
        if ids is None or ids == 1:
            return
        if self.compression is not None and len(self.compression) < ids:
            allowed = f"one new id for each of the {ids} tokens of the model"
            remedy = "make it with the model's own tokenizer"
            raise ConfigError(f"compression of {len(self.compression)} ids: must have {allowed}; {remedy}")
        for name, named in (("fill_id", (self.fill_id,)), ("end_ids", self.end_ids)):
            if max(named, default=0) >= ids:
                raise ConfigError(problem(name, max(named), f"a token below vocab_size={ids}", "name a token of the model"))

    def row_hash(self, site: SublayerPosition) -> RowHash:
        """The hash at this site.

        Raises:
            ConfigError: an unknown vocabulary, or sums that int64 cannot hold.
        """
        ids = self.hash_vocab or site.stack.vocab_size
        if ids is None and self.hash != "int32":
            remedy = "build it in a Decoder, pass vocab_size, or set hash_vocab"
            raise ConfigError(f"vocab_size is unknown: must be known, since hashes of tokens depend on it; {remedy}")
        before = [slot.hashed for slot in site.stack.slots[: site.index] if slot.hashed]
        return RowHash.of(self.hash, self.order, self.wanted, self.seed, ids or 0, site.block, before)

    def table_shape(self, site: SublayerPosition) -> tuple[int, int]:
        """Rows of all tables together, and their width."""
        rows = -(-sum(self.row_hash(site).sizes) // self.row_multiple) * self.row_multiple
        return rows, self.row_width or site.d_model


@dataclass(frozen=True, eq=False)
class IdHistory:
    """The last N - 1 hashed ids of each row, an immutable value; `NOTHING` is a blank."""

    ids: Int[Tensor, "B P"] | None = None

    @property
    def length(self) -> int:
        """How many are kept."""
        return 0 if self.ids is None else self.ids.shape[1]


class Found(NamedTuple):
    """What a table says of some tokens.

    Attributes:
        rows: of every table.
        ids: of each token, and of those before it.
        history: for the next call.
    """

    rows: Float[Tensor, "B T C W"]
    ids: list[Int[Tensor, "B T"]]
    history: IdHistory


class HashedTable(DeclaredModule):
    """Tables that share one matrix of rows, which starts at zero."""

    def __init__(self, config: TableOptions, site: SublayerPosition) -> None:
        super().__init__()
        self.config, self.hash = config, config.row_hash(site)
        shape = config.table_shape(site)
        self.weight = self.parameter("weight", shape, Constant(0.0), "table", lr_scale=LR_SCALE)
        self.width = len(self.hash.sizes) * shape[1]
        # A constant, no buffer: a model without values has it too.
        with torch.device("cpu"):
            self.new_ids = None if config.compression is None else torch.tensor(config.compression)

    def forward(self, tokens: Int[Tensor, "B T"], layout: TokenLayout, history: IdHistory) -> Found:
        """Looks up the rows of tokens that go on from a history."""
        ids = self._ids(tokens)
        known = ids if history.ids is None else torch.cat((history.ids, ids), dim=1)
        window = self._window(known, layout, ids.shape[1])
        kept = known[:, max(0, known.shape[1] - self.config.order + 1) :].clone()
        return Found(self._rows(self.hash.rows(window), ids), window, IdHistory(kept))

    def _ids(self, tokens: Tensor) -> Tensor:
        ids = tokens.long() if self.new_ids is None else self.new_ids.to(tokens.device)[tokens]
        for blank in self.config.blank_ids:
            ids = ids.masked_fill(tokens == blank, NOTHING)
        return ids

    def _window(self, known: Tensor, layout: TokenLayout, tokens: int) -> list[Tensor]:
        config = self.config
        documents = documents_of(layout, known.shape[1], config.document_reset != "none")
        if config.blank_ids:
            documents = (torch.zeros_like(known) if documents is None else documents).masked_fill(known == NOTHING, PADDING)
        new = config.compression or range(LARGEST_ID)
        fill = NOTHING if config.hash == "int32" else new[config.fill_id]
        return token_window(known, tokens, config.order, fill, documents, [new[end] for end in config.end_ids])

    def _rows(self, rows: Int[Tensor, "B T C"], ids: Int[Tensor, "B T"]) -> Float[Tensor, "B T C W"]:
        """Zeros for blanks, and for row 0 of the polynomial hash, which stands for no token."""
        config = self.config
        found = table_rows(self.weight, rows + torch.tensor(self.hash.offsets, device=rows.device))
        if config.untrained_row is not None:
            found = torch.where((rows == config.untrained_row).unsqueeze(-1), found.detach(), found)
        if config.hash == "polynomial":
            return found.masked_fill((rows == 0).unsqueeze(-1), 0.0)
        return found.masked_fill((ids == NOTHING)[..., None, None], 0.0) if config.blank_ids else found


def documents_of(layout: TokenLayout, length: int, reset: bool) -> Int[Tensor, "B R"] | None:
    """The documents of the last tokens; one for all that is no padding where documents reset nothing."""
    documents = layout.key_documents(length)
    return documents if documents is None or reset else documents.clamp(max=0)
