"""The data of an audit, `audit.json` of a run folder.

Sublayers are numbered along depth; the index `n_sublayers` is the final read before the head.
"""

from typing import Literal

from twoaxis.core.config import Config
from twoaxis.core.views import Role

FORMAT = 1
"""The version of the fields below."""


class AuditedSublayer(Config):
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
    """The weights of the sources of one sum, over the tokens of one class.

    Attributes:
        weight: the mean weight of each source, signed, in the order of `Routing.sources`.
        entropy: of the normalised absolute weights of a token, in nats; the mean over tokens.
        favourite: the source with the largest mean absolute weight.
    """

    weight: tuple[float, ...]
    entropy: float
    favourite: str


class Routing(Config):
    """One weighted sum that the depth mixer forms.

    Attributes:
        sublayer: that reads the sum, or writes it into the streams.
        result: of the sum: `read`, `q`, `k`, `v`, `residual`, `stream` or `stream 0`.
        part: the fraction of the width with separate weights, or empty.
        role: `read`, or `mix` for a sum that only mixes parallel streams.
        sources: names, oldest first, the same at every sublayer.
        share: mean over tokens of the normalised absolute weights; sums to 1.
        deviation: standard deviation of each weight over tokens; 0 for static weights.
        classes: by token class; `all` is every token, and the only class of sums that mix streams or make a fraction.
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
    """The gates of the delta writes of one sublayer.

    Attributes:
        sublayer: its index.
        mean: of the gate beta, in (0, 2).
        near_0: share of the tokens with beta below 0.1: nothing is written.
        between: share with beta from 0.1 to 0.9: the component moves part of the way to its target.
        near_1: share with beta from 0.9 to 1.1: the component is replaced by its target.
        above_1: share with beta above 1.1: the component moves past its target.
        before: mean distance of the component k^T X from its target before the write.
        after: mean distance after the write.
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
        row: the largest absolute row sum, which bounds the gain of streams.
        column: the largest absolute column sum, which bounds the gain of gradients.
        spectral: the largest singular value.
    """

    sublayer: int
    row: float
    column: float
    spectral: float


class Streams(Config):
    """Parallel streams, or the fractions of one stream, along depth.

    Attributes:
        names: of the streams or fractions.
        spread: before each sublayer and after the last: root mean square distance of the streams from their mean, over their
            root mean square; a mean over tokens. 0 means that all are equal.
        gain: of the composite mixing matrix, by sublayer.
    """

    names: tuple[str, ...]
    spread: tuple[float, ...]
    gain: tuple[Gain, ...]


class Norms(Config):
    """Sizes of tensors at one sublayer, as means over tokens.

    Attributes:
        sublayer: its index.
        read: root mean square of its views before the norm.
        update: root mean square of its update.
        state: root mean square of the tensors of the depth state before it.
        gradient: Euclidean norm of the gradient of the summed loss with respect to the update, in nats per unit.
    """

    sublayer: int
    read: float
    update: float
    state: float
    gradient: float


class Attention(Config):
    """The distances of one softmax attention.

    Attributes:
        sublayer: its index.
        place: `mixer`, or `input_local`, `projected_local` or `update_local` inside it.
        kind: of the mixer, such as `short_swa`.
        window: visible tokens, including the query's; None is all.
        mean_distance: of attended tokens, without the sink and slots.
        distances: starts of the bins: 0, 1, 2, 4, 8 and so on.
        mass: share of the attention in each bin, out of a total that includes the sink and slots.
        sink: share of the sink; 0 without one.
        slots: share of the token's own slots along depth; 0 without them.
    """

    sublayer: int
    place: str
    kind: str
    window: int | None
    mean_distance: float
    distances: tuple[int, ...]
    mass: tuple[float, ...]
    sink: float
    slots: float = 0.0


What = Literal["sublayer", "embedding", "stream", "local", "source"]
Replacement = Literal["zero", "mean"]
Choice = Literal["favourite", "random", ""]


class Ablation(Config):
    """The change of the loss when a component is removed, with a random change of the same norm as control.

    Attributes:
        what: the removed component: the update of a `sublayer`; the `embedding` in all weighted sums; a `stream` of the state
            before a sublayer; a `local` mixer inside a sublayer; or one `source` of the read of a sublayer.
        sublayer: its index; for the embedding that of the first sum.
        target: kind of the sublayer, or name of the stream, the local mixer, or the source.
        replacement: `zero`, or its `mean` over all tokens.
        choice: of a source: the `favourite` of its sublayer, or a `random` other one.
        change_norm: mean Euclidean norm of the change, per token.
        loss_change: in nats per token; positive when the model needs the component. None if not finite.
        standard_error: of the loss change, paired over sequences; None with one sequence.
        control_loss_change: of a random change with the same norm at every token.
        control_standard_error: of the control's loss change.
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
    """The cost of the audit.

    Attributes:
        observe_seconds: of the measurements.
        gradient_seconds: of the backward passes.
        ablation_seconds: of the ablations and their controls.
        passes: forward passes of the ablations over the whole sample, each from the sublayer that it changes.
    """

    observe_seconds: float
    gradient_seconds: float
    ablation_seconds: float
    passes: int


class Audit(Config):
    """The audit of a model along both axes, on validation text in float32.

    Attributes:
        format: version of these fields.
        step: of the optimizer.
        depth: the kind of the depth mixer.
        seed: of random changes and choices.
        tokens: read.
        targets: tokens with a loss.
        sequences: windows, over which standard errors are taken.
        loss: of the unchanged model, in nats per token.
        sublayers: in order of depth.
        class_tokens: number of tokens by class; classes overlap.
        routing: the weighted sums of the depth mixer.
        routing_note: describes them, or says that there are none.
        gates: of delta writes; empty for other mixers.
        streams: of a state with parallel streams; None for other states.
        norms: by sublayer.
        attention: every softmax attention.
        ablations: all ablations.
        effort: cost of the audit.
    """

    format: Literal[1] = FORMAT
    step: int
    depth: str
    seed: int
    tokens: int
    targets: int
    sequences: int
    loss: float
    sublayers: tuple[AuditedSublayer, ...]
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
        """All sources of reads, oldest first: the columns of the heat map of shares."""
        return tuple(dict.fromkeys(name for one in self.routing if one.role == "read" for name in one.sources))

    def sublayer_name(self, index: int) -> str:
        """The name of a sublayer for readers; the head follows the last."""
        return f"{index} {self.sublayers[index].kind}" if index < len(self.sublayers) else "head"

    def shares(self) -> dict[int, dict[str, float]]:
        """By sublayer, the share of each source in its read, averaged over all sums: the rows of the heat map."""
        found: dict[int, dict[str, float]] = {}
        for sublayer in dict.fromkeys(one.sublayer for one in self.routing if one.role == "read"):
            sums = [one for one in self.routing if one.sublayer == sublayer and one.role == "read"]
            row = found.setdefault(sublayer, {})
            for one in sums:
                for name, share in zip(one.sources, one.share, strict=True):
                    row[name] = row.get(name, 0.0) + share / len(sums)
        return found
