"""Converts running sums to the parts of an `Audit`."""

from twoaxis.audit.observe import Observer, n_pieces
from twoaxis.audit.result import Attention, Gain, Gates, Norms, Routing, Streams
from twoaxis.audit.routing import rounded
from twoaxis.depth import DEPTH, DepthConfig
from twoaxis.ops.streams import piece_names


def routing_note(config: DepthConfig, routing: tuple[Routing, ...]) -> str:
    """Describes the weighted sums of the depth mixer, or states that there are none."""
    kind = config.kind
    what = f"{kind} {DEPTH[kind].summary}" if kind in DEPTH else kind
    reads = {one.sublayer for one in routing if one.role == "read"}
    mixes = {one.sublayer for one in routing if one.role == "mix"}
    if not routing:
        return f"{what}: it forms no weighted sum of depth sources, so there are no weights to show"
    parts = []
    if reads:
        parts.append(f"weighted sums are read at {_counted(reads)}")
    if mixes:
        parts.append(f"streams are mixed at {_counted(mixes)}")
    return f"{what}: {', and '.join(parts)}"


def _counted(places: set[int]) -> str:
    return f"{len(places)} place" + ("s" if len(places) > 1 else "")


def norms_of(observer: Observer) -> tuple[Norms, ...]:
    """The norms at every sublayer."""
    means = observer.means
    names = ("read", "update", "state", "gradient")
    return tuple(
        Norms(sublayer=index, **{name: means.number((name, index)) for name in names})
        for index in range(len(observer.sublayers))
    )


def gates_of(observer: Observer) -> tuple[Gates, ...]:
    """The gates of all delta writes."""
    means, found = observer.means, []
    for index in range(len(observer.sublayers)):
        if ("beta", index) not in means:
            continue
        near_0, near_1, above_1 = (means.number((name, index)) for name in ("near 0", "near 1", "above 1"))
        found.append(
            Gates(
                sublayer=index,
                mean=means.number(("beta", index)),
                near_0=near_0,
                between=round(max(0.0, 1 - near_0 - near_1 - above_1), 6),
                near_1=near_1,
                above_1=above_1,
                before=means.number(("before", index)),
                after=means.number(("after", index)),
            )
        )
    return tuple(found)


def streams_of(observer: Observer) -> Streams | None:
    """Spread and composite gain of parallel streams; None without them."""
    n, m = n_pieces(observer.model)
    if n * m == 1:
        return None
    means, count = observer.means, len(observer.sublayers)
    gains = tuple(
        Gain(sublayer=index, **{name: means.number((name, index)) for name in ("row", "column", "spectral")})
        for index in range(count)
        if ("row", index) in means
    )
    spread = tuple(means.number(("spread", index)) for index in range(count + 1))
    return Streams(names=piece_names(n, m), spread=spread, gain=gains)


def attention_of(observer: Observer) -> tuple[Attention, ...]:
    """The distances of every softmax attention."""
    kinds = {(index, "mixer"): site.slot.kind for index, site in enumerate(observer.model.config.stack.sites)}
    kinds |= {(index, place): kind for index, place, kind, _ in observer.locals}
    found = []
    for (index, place), distances in sorted(observer.distances.items()):
        begins, mass = distances.bins()
        found.append(
            Attention(
                sublayer=index,
                place=place,
                kind=kinds[index, place],
                window=distances.window,
                mean_distance=round(distances.mean, 4),
                distances=begins,
                mass=rounded(mass, 5),
                sink=round(distances.sink / max(distances.queries, 1), 6),
                slots=round(distances.slots / max(distances.queries, 1), 6),
            )
        )
    return tuple(found)
