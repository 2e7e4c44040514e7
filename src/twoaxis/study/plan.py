"""What a study will run and cost, before anything runs."""

from dataclasses import dataclass

from twoaxis.core.cost import Shape
from twoaxis.data import prepare
from twoaxis.data.tokenizer import BpeConfig, ByteConfig, ByteTokenizer
from twoaxis.model.cost import decoder_cost
from twoaxis.study.design import StudyConfig
from twoaxis.study.folder import tokens_per_step
from twoaxis.train.recipe import TrainConfig


@dataclass(frozen=True)
class PlannedArm:
    """One arm before it runs.

    Attributes:
        name: the arm.
        parameters: a count.
        training_flops_per_token: three forward passes, since the backward pass computes twice as much; a count.
    """

    name: str
    parameters: int
    training_flops_per_token: float


@dataclass(frozen=True)
class StudyPlan:
    """All arms and replicates of a study.

    Attributes:
        arms: in the order of the design.
        seeds: one replicate each.
        steps: of every run.
        tokens_per_run: that every run reads, a count.
    """

    arms: tuple[PlannedArm, ...]
    seeds: tuple[int, ...]
    steps: int
    tokens_per_run: int

    @property
    def runs(self) -> int:
        """Arms times replicates."""
        return len(self.arms) * len(self.seeds)

    @property
    def flops(self) -> float:
        """Of all training, validation not counted; a count."""
        return len(self.seeds) * self.tokens_per_run * sum(arm.training_flops_per_token for arm in self.arms)


def plan_study(study: StudyConfig) -> StudyPlan:
    """Counts what the study will run; a byte-pair vocabulary is taken to be as large as asked for.

    Example:
        >>> study = StudyConfig(
        ...     question="?", control="a", arms={"a": {}, "b": {"model": {"depth": "deep_delta"}}}, replicates=2,
        ...     base={"model": {"d_model": 64, "n_layers": 2}}, budget={"steps": 10}, decision={"smallest_effect": 0.02},
        ... )
        >>> [arm.parameters for arm in plan_study(study).arms]
        [117056, 117576]
    """
    recipe = study.recipe(study.control, study.replicates[0])
    vocab_size = _vocab_size(recipe)
    arms = tuple(_planned(name, study.recipe(name, study.replicates[0]), vocab_size) for name in study.arms)
    return StudyPlan(arms, study.replicates, recipe.steps, recipe.steps * tokens_per_step(recipe))


def _planned(name: str, recipe: TrainConfig, vocab_size: int) -> PlannedArm:
    shape = Shape(recipe.batch_size, recipe.data.seq_len)
    cost = decoder_cost(recipe.decoder(vocab_size), shape)
    return PlannedArm(name, cost.params, 3 * cost.flops / shape.total_tokens)


def _vocab_size(recipe: TrainConfig) -> int:
    tokenizer = recipe.data.tokenizer
    if isinstance(tokenizer, ByteConfig):
        return ByteTokenizer().vocab_size
    if isinstance(tokenizer, BpeConfig):
        return tokenizer.vocab_size
    return prepare(recipe.data.corpus, tokenizer).tokenizer.vocab_size
