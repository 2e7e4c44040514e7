"""What an audit finds, as plain frozen data: `audit.json` of a run folder.

A sublayer is named by its index along depth; the index `n_sublayers`, one behind the last, is the final read before the head.
"""

from typing import Literal

from twoaxis.core.config import Config
from twoaxis.core.weighted_sum import Role

FORMAT = 1
"""The version of the fields below."""


class Place(Config):
    """A sublayer.

    Attributes:
        index: along depth, from 0.
        block: its block, from 0.
        kind: of its mixer, such as `attention`.
    """

    index: int
    block: int
    kind: str


class ClassRouting(Config):
    """How the tokens of one class weigh the sources of one sum.

    Attributes:
        weight: the mean weight of each source, signed, in the order of `Routing.sources`.
        entropy: of the absolute weights of a token over their sum, in nats; the mean over tokens.
        favourite: the source with the largest mean absolute weight.
    """

    weight: tuple[float, ...]
    entropy: float
    favourite: str


class Routing(Config):
    """One weighted sum that the depth mixer forms.

    Attributes:
        sublayer: the sublayer that reads it, or that writes it into the stream or streams.
        result: what the sum is: `read`, `q`, `k`, `v`, `residual`, `stream` or `stream 0`.
        part: the fraction of the width, where fractions have weights of their own; else empty.
        role: `read`, or `mix` for a sum that only mixes parallel streams.
        sources: names of the sources, oldest first; names mean the same at every sublayer.
        share: the mean over tokens of the absolute weight over the sum of absolute weights; adds up to 1.
        deviation: the standard deviation of each weight over tokens; 0 for static weights.
        classes: by token class; `all` is every token, and the only class of a sum that mixes streams or that makes a fraction.
    """

    sublayer: int
    result: str
    part: str
    role: Role
    sources: tuple[str, ...]
    share: tuple[float, ...]
    deviation: tuple[float, ...]
    classes: dict[str, ClassRouting]


class Gates(Config):
    """How the delta writes of one sublayer work.

    Attributes:
        sublayer: which.
        mean: of the gate beta, in (0, 2).
        near_0: part of the tokens with beta below 0.1: nothing is written.
        between: part with beta from 0.1 to 0.9: the component moves part of the way to its target.
        near_1: part with beta from 0.9 to 1.1: the component is replaced by its target.
        above_1: part with beta above 1.1: the component moves beyond its target.
        before: mean distance of the component k^T X from its target before the write.
        after: the same after the write.
    """

    sublayer: int
    mean: float
    near_0: float
    between: float
    near_1: float
    above_1: float
    before: float
    after: float


class Gain(Config):
    """The product of the residual mixing matrices of all sublayers up to one, a mean over tokens.

    Attributes:
        sublayer: the last sublayer of the product.
        row: the largest sum of absolute values of a row: how much a new stream may hold of the first ones.
        column: that of a column: the same for gradients.
        spectral: the largest singular value.
    """

    sublayer: int
    row: float
    column: float
    spectral: float


class Streams(Config):
    """What becomes of parallel streams, or of the fractions of one stream.

    Attributes:
        names: of the streams or fractions.
        spread: at every boundary, 0 to n_sublayers: the root mean square distance of the streams from their mean, over their
            own root mean square; a mean over tokens. 0 means that all are equal.
        gain: of the composite mixing matrix, by sublayer.
    """

    names: tuple[str, ...]
    spread: tuple[float, ...]
    gain: tuple[Gain, ...]


class Norms(Config):
    """How large things are at one sublayer; means over tokens.

    Attributes:
        sublayer: which.
        read: root mean square of what it reads, before its norm, over all views.
        update: root mean square of what it writes.
        state: root mean square of the tensors of the depth state it reads from.
        gradient: the Euclidean norm of the gradient of the summed loss with respect to the update, in nats per unit.
    """

    sublayer: int
    read: float
    update: float
    state: float
    gradient: float


class Attention(Config):
    """How far one softmax attention looks back.

    Attributes:
        sublayer: where it is.
        place: `mixer`, or `input_local` or `projected_local` inside it.
        kind: of the mixer, such as `short_swa`.
        window: tokens it can see, itself included; None is all.
        mean_distance: of the attended token, in tokens, without the sink.
        distances: where bins begin: 0, 1, 2, 4, 8 and so on.
        mass: the part of the attention in each bin, the sink included in the whole.
        sink: the part on the sink; 0 without one.
    """

    sublayer: int
    place: str
    kind: str
    window: int | None
    mean_distance: float
    distances: tuple[int, ...]
    mass: tuple[float, ...]
    sink: float


What = Literal["sublayer", "embedding", "stream", "local", "source"]
Replacement = Literal["zero", "mean"]
Choice = Literal["favourite", "random", ""]


class Ablation(Config):
    """What the loss does when something is taken away, beside a random change of the same size.

    Attributes:
        what: the update of a `sublayer`; the `embedding` in all weighted sums that hold it; a `stream` of the state that enters
            a sublayer; the mixing of a `local` mixer inside a sublayer; or one `source` of what one sublayer reads.
        sublayer: where; for the embedding the first sum that holds it.
        target: the kind of the sublayer, or the name of the stream, the place, or the source.
        replacement: by `zero`, or by its `mean` over all tokens.
        choice: of a source: the `favourite` one of its sublayer, or a `random` other one.
        change_norm: the mean Euclidean norm of the change, per token.
        loss_change: in nats per token; positive when the model needs what was taken. None if not finite.
        standard_error: of the change, over sequences and paired; None with one sequence.
        control_loss_change: of a random change with the same norm at every token.
        control_standard_error: of that.
    """

    what: What
    sublayer: int
    target: str
    replacement: Replacement
    choice: Choice = ""
    change_norm: float
    loss_change: float | None
    standard_error: float | None
    control_loss_change: float | None
    control_standard_error: float | None


class Effort(Config):
    """What the audit itself took.

    Attributes:
        observe_seconds: of measuring, without changing anything.
        gradient_seconds: of the backward passes.
        ablation_seconds: of the ablations and their controls.
        passes: forward passes over the whole sample that the ablations began, from the sublayer that they change.
    """

    observe_seconds: float
    gradient_seconds: float
    ablation_seconds: float
    passes: int


class Audit(Config):
    """What a model does along both axes, measured on validation text in float32.

    Attributes:
        format: version of these fields.
        step: optimizer steps that the model has taken.
        depth: the kind of its depth mixer.
        seed: of random changes and choices.
        tokens: read.
        targets: tokens that carry a loss.
        sequences: windows, over which standard errors are taken.
        loss: of the untouched model, in nats per token.
        sublayers: all of them in order.
        class_tokens: how many tokens each token class has; classes overlap.
        routing: the weighted sums of the depth mixer.
        routing_note: in words, what they are, or that there are none.
        gates: of delta writes; empty for other mixers.
        streams: of a state with parallel streams; None for other states.
        norms: by sublayer.
        attention: every softmax attention.
        ablations: all of them.
        effort: what it took.
    """

    format: Literal[1] = FORMAT
    step: int
    depth: str
    seed: int
    tokens: int
    targets: int
    sequences: int
    loss: float
    sublayers: tuple[Place, ...]
    class_tokens: dict[str, int]
    routing: tuple[Routing, ...]
    routing_note: str
    gates: tuple[Gates, ...]
    streams: Streams | None
    norms: tuple[Norms, ...]
    attention: tuple[Attention, ...]
    ablations: tuple[Ablation, ...]
    effort: Effort

    @property
    def source_names(self) -> tuple[str, ...]:
        """Every source that anything reads, oldest first: the columns of a heat map of what is read."""
        return tuple(dict.fromkeys(name for one in self.routing if one.role == "read" for name in one.sources))

    def sublayer_name(self, index: int) -> str:
        """What a sublayer is called for readers; the head stands behind the last."""
        return f"{index} {self.sublayers[index].kind}" if index < len(self.sublayers) else "head"

    def shares(self) -> dict[int, dict[str, float]]:
        """By reading sublayer, the share of each source in what is read, over all ways and parts: the rows of that heat map."""
        found: dict[int, dict[str, float]] = {}
        for sublayer in dict.fromkeys(one.sublayer for one in self.routing if one.role == "read"):
            sums = [one for one in self.routing if one.sublayer == sublayer and one.role == "read"]
            row = found.setdefault(sublayer, {})
            for one in sums:
                for name, share in zip(one.sources, one.share, strict=True):
                    row[name] = row.get(name, 0.0) + share / len(sums)
        return found
