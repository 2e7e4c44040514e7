"""One process of a pipeline: runs every case it is given and writes down what happened, for the test to judge."""

import gc
import json
import weakref
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed import distributed_c10d

from twoaxis.core.cost import Cost, Shape
from twoaxis.core.design import InitEquivalence, MixingDesign
from twoaxis.core.measure import perturb, tensors
from twoaxis.core.position import LayerStack, SublayerPosition
from twoaxis.depth import DepthConfig, DepthEnds, DepthMixer
from twoaxis.depth.base import Layout
from twoaxis.model import DecoderConfig
from twoaxis.ops.cross_entropy import IGNORE
from twoaxis.train.parallel import boundaries
from twoaxis.train.parallel.boundaries import PipelineConfig
from twoaxis.train.parallel.pipeline import Pipeline
from twoaxis.train.parallel.stage import CachingStage

STEPS = 2
LEARNING_RATE = 1e-3
VOCABULARY = 11
PATIENCE_SECONDS = 300


class StrangeConfig(DepthConfig):
    """A stream, and what no published mixer has: a statistic without gradient, an integer, a tensor that stands twice."""

    kind: Literal["strange"] = "strange"

    @property
    def design(self) -> MixingDesign:
        return MixingDesign("none", "none", "x_g", "none", "own state", "none", "is the stream")

    @property
    def init_equivalence(self) -> InitEquivalence:
        return InitEquivalence("none", "adds an old scale")

    def cost(self, site: SublayerPosition, shape: Shape) -> Cost:
        return Cost()

    def build(self, stack: LayerStack) -> "tuple[list[Strange], StrangeEnds]":
        return [Strange() for _ in stack.sites], StrangeEnds()


class Strange(DepthMixer):
    def read(self, state: Any, layout: Layout = None, cache: Any = None) -> tuple[torch.Tensor, None, Any]:
        first, stream, again, scale, count = state
        return stream + again + scale * first + count, None, cache

    def write(self, state: Any, update: torch.Tensor, context: Any, carry: None) -> Any:
        first, stream, _, scale, count = state
        stream = stream + update
        return first, stream, stream, scale, count + 1


class StrangeEnds(DepthEnds):
    def enter(self, embeddings: torch.Tensor, layout: Layout = None, cache: Any = None) -> tuple[Any, Any]:
        scale = embeddings.detach().square().mean(-1, keepdim=True)
        count = torch.ones(scale.shape, dtype=torch.int64, device=scale.device)
        return (embeddings, embeddings, embeddings, scale, count), cache

    def leave(self, state: Any, layout: Layout = None, cache: Any = None) -> tuple[torch.Tensor, Any]:
        return state[1], cache


class Traffic:
    """Bytes at the call that sends a tensor, by direction and boundary."""

    def __init__(self) -> None:
        self.bytes: Counter[str] = Counter()
        self._ways: dict[int, tuple[torch.Tensor, str]] = {}
        send = dist.isend

        def counted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            # Torch lets the stages vote before its first step, and two ranks exchange gradients of what they share.
            _, way = self._ways.pop(id(tensor), (tensor, "other"))
            self.bytes[way] += tensor.nbytes
            return send(tensor, *args, **kwargs)

        # P2POp compares its operation with the module's own name for it.
        dist.isend = distributed_c10d.isend = counted
        self._label("get_fwd_send_ops", "activations", 0)
        self._label("get_bwd_send_ops", "gradients", -1)

    def _label(self, method: str, what: str, offset: int) -> None:
        make = getattr(CachingStage, method)

        def labelled(stage: CachingStage, chunk: int) -> Any:
            made = make(stage, chunk)
            for op in made:
                self._ways[id(op.tensor)] = op.tensor, f"{what} {stage.stage_index + offset}"
            return made

        setattr(CachingStage, method, labelled)

    def take(self) -> dict[str, int]:
        """What was sent since the last call."""
        assert not self._ways, "a tensor was to be sent and was not"
        found = dict(self.bytes)
        self.bytes.clear()
        return found


def batch(shape: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, targets of which some count for nothing, and documents."""
    rows, length = shape
    tokens = torch.arange(rows * length).reshape(shape) ** 2 % VOCABULARY
    targets = tokens.roll(-1, 1)
    targets[0, :3] = IGNORE
    documents = (torch.arange(length) >= length // 2).long().expand(shape)
    return tokens, targets, documents.contiguous()


def decoder_of(case: dict[str, Any]) -> DecoderConfig:
    """The undivided decoder."""
    # A mixer of these tests only stands in no table, so it comes as what it is.
    depth = StrangeConfig() if case["decoder"]["depth"]["kind"] == "strange" else case["decoder"]["depth"]
    return DecoderConfig.from_data({**case["decoder"], "depth": depth})


def prepare(folder: Path) -> None:
    """Lets all ranks and pipelines of one decoder share the pass without memory that finds its states.

    It depends on nothing else.
    """
    states, known = boundaries._states, dict[Any, list[Any]]()

    def shared(model: Any, tokens: torch.Tensor, stops: Sequence[int]) -> list[Any]:
        key = model.config, tokens.shape
        if key not in known:
            known[key] = states(model, tokens, range(1, len(model.blocks)))
        return [known[key][stop - 1] for stop in stops]

    boundaries._states = shared
    for case in cases_of(folder):
        config, rows = PipelineConfig.from_data(case["pipeline"]), case["rows"] // case["pipeline"]["microbatches"]
        boundaries.make_plan(decoder_of(case), config, rows, case["length"], torch.float64)


def cases_of(folder: Path) -> list[dict[str, Any]]:
    """The most ranks first: those that are then left out wait at the end only."""
    return sorted(json.loads((folder / "cases.json").read_text()), key=lambda case: -case["pipeline"]["ranks"])


def watch(pipeline: Pipeline) -> list[weakref.ref[torch.Tensor]]:
    """Every tensor that a block makes, while it is alive."""
    found: list[weakref.ref[torch.Tensor]] = []

    def note(module: Any, given: Any, made: Any) -> None:
        found.extend(weakref.ref(t) for t in tensors(made) if t.grad_fn is not None)

    for block in pipeline.model.blocks:
        block.register_forward_hook(note)
    return found


def run(
    case: dict[str, Any], traffic: Traffic, group: dist.ProcessGroup | None
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Takes steps whose gradients add up, with an update in between."""
    config, shape = PipelineConfig.from_data(case["pipeline"]), (case["rows"], case["length"])
    pipeline = Pipeline(decoder_of(case), config, *shape, dtype=torch.float64, group=group)
    perturb(pipeline.model)
    alive = watch(pipeline)
    tokens, targets, documents = batch(shape)
    given = (tokens, targets, documents if case["documents"] else None)
    report: dict[str, Any] = {"losses": [], "tokens": [], "sent": [], "alive": [], "evaluated": []}
    gradients = {}
    for step in range(case["steps"]):
        loss = pipeline.step(*given)
        report["losses"].append(loss.total.item())
        report["tokens"].append(loss.tokens.item())
        report["sent"].append(traffic.take())
        if any(reference() is not None for reference in alive):
            gc.collect()
        report["alive"].append([len(alive), sum(reference() is not None for reference in alive)])
        alive.clear()
        for name, parameter in pipeline.model.named_parameters():
            if parameter.grad is not None:
                gradients[f"{step}/{name}"] = parameter.grad.clone()
        if case["evaluate"]:
            report["evaluated"].append(pipeline.evaluate(*given).total.item())
            traffic.take()
        with torch.no_grad():
            for parameter in pipeline.model.parameters():
                if parameter.grad is not None:
                    parameter -= LEARNING_RATE * parameter.grad
    return report, gradients


def main(folder: Path, rank: int, ranks: int) -> None:
    """Runs all cases, those for fewer ranks in a group of the first ones."""
    torch.set_num_threads(1)
    meeting = f"file://{folder / 'meeting'}"
    dist.init_process_group(
        "gloo", init_method=meeting, rank=rank, world_size=ranks, timeout=timedelta(seconds=PATIENCE_SECONDS)
    )
    groups: dict[int, Any] = {n: None if n == ranks else dist.new_group(range(n)) for n in range(1, ranks + 1)}
    traffic = Traffic()
    reports, found = {}, {}
    # So that a collection after a step need not walk through all that was imported.
    gc.freeze()
    for case in cases_of(folder):
        needed = case["pipeline"]["ranks"]
        if rank < needed:
            reports[case["name"]], gradients = run(case, traffic, groups[needed])
            found |= {f"{case['name']}/{name}": gradient for name, gradient in gradients.items()}
    save_file(found, folder / f"gradients{rank}.safetensors")
    (folder / f"report{rank}.json").write_text(json.dumps(reports))
    dist.barrier()
    dist.destroy_process_group()
