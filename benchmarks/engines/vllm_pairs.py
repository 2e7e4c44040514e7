"""`python -m benchmarks.engines.vllm_pairs`: pairs of mixers in vLLM itself, against the greedy tokens of transformers.

For each cell of docs/engines.md without an obstacle, one pair of variants: vLLM and transformers load its export, and both
continue the same prompts. The longest prompt has 4,080 tokens and is read in chunks, beside two other requests that generate
meanwhile.
"""

import argparse
import gc
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

os.environ |= {
    # In this process, so that it can run one model after another.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}

import torch
from docs import engines as page
from torch import nn
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM
from vllm import LLM, SamplingParams, TokensPrompt
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

from benchmarks.engines import kept
from twoaxis import DEPTH, SEQUENCE, Decoder
from twoaxis.core.measure import perturb
from twoaxis.interop.hugging_face import export_folder

NAME = "vllm"
PACKAGES = ("vllm-cpu", "torch", "transformers")
SIZES = {"vocab_size": 256, "d_model": 128, "n_layers": 3, "max_seq_len": 4352}
PROMPTS, NEW_TOKENS, BATCHED = (5, 300, 4080), 16, 512
FACTS = {
    "prompt_tokens": PROMPTS,
    "new_tokens": NEW_TOKENS,
    "max_num_batched_tokens": BATCHED,
    "dtype": "float32",
    "decoder": SIZES,
}


class Case(NamedTuple):
    """A pair of variants, and how it runs.

    Attributes:
        depth: kind of the depth mixer.
        variant: of it.
        sequence: kind of the sequence mixer.
        sequence_variant: of it.
        tied: whether the head is the embedding.
        compiled: whether vLLM compiles the model.
    """

    depth: str
    variant: str
    sequence: str
    sequence_variant: str
    tied: bool = False
    compiled: bool = False


class Continuation(NamedTuple):
    """Greedy tokens of all prompts, and their log-probabilities."""

    tokens: list[list[int]]
    logprobs: torch.Tensor


def main() -> int:
    """Runs the cases and keeps what they came to; with `--only`, those of some depth mixers, and the others as they were."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--only", nargs="*", default=[], help="kinds of depth mixers")
    only = parser.parse_args().only
    found = {Case(**{name: run[name] for name in Case._fields}): run for run in kept.read(NAME)["runs"]} if only else {}
    every = list(cases())
    run = [case for case in every if not only or case.depth in only]
    with tempfile.TemporaryDirectory() as folder:
        # All of them first: vLLM changes the class of the model for the rest of the process.
        expected = {case: alone(case, Path(folder) / str(number)) for number, case in enumerate(run)}
        for number, case in enumerate(run):
            found[case] = {**case._asdict(), **outcome(case, Path(folder) / str(number), expected[case])}
            print(found[case], flush=True)
    runs = [found[case] for case in every if case in found]
    kept.write(NAME, kept.header(*PACKAGES, **FACTS), runs)
    return 0 if all(run["result"] == "equal" for run in runs) else 1


UNTIED = ("deep_delta", "laurel_gemma3n")
"""Depth mixers whose random models repeat the last token when the output matrix is the embedding."""


def cases() -> Iterator[Case]:
    """The pairs: one of every cell without an obstacle, every variant of those columns in a plain model, and one compiled."""
    for row in page.rows():
        for index, column in enumerate(page.columns()):
            if not row.answers[index]:
                kind, tied = row.row.kind, column.row.kind == "short_swa" and row.row.kind not in UNTIED
                for name in column.names if kind == "residual" else column.names[:1]:
                    yield Case(kind, row.names[0], column.row.kind, name, tied)
    yield Case("mhc", next(iter(DEPTH["mhc"].examples)), "attention", "mha", compiled=True)


def outcome(case: Case, folder: Path, expected: Continuation) -> dict[str, Any]:
    """What came of a case: `equal`, `different` or `refused`, and why."""
    try:
        got = in_vllm(folder, case.compiled)
    except Exception as error:
        return {"result": "refused", "reason": " ".join(str(error).split())[:300] or type(error).__name__}
    away = float((got.logprobs - expected.logprobs).abs().max())
    distinct = len({token for row in expected.tokens for token in row})
    measured = {"distinct_tokens": distinct, "logprob_difference": float(f"{away:.1e}")}
    if got.tokens == expected.tokens:
        return {"result": "equal", **measured}
    pairs = zip(PROMPTS, got.tokens, expected.tokens, strict=True)
    wrong = [f"{prompt} tokens" for prompt, ours, theirs in pairs if ours != theirs]
    return {"result": "different", "reason": f"other tokens after the prompts of {', '.join(wrong)}", **measured}


def decoder(case: Case) -> Decoder:
    """A model away from its initial values, whose matrices are large enough that greedy tokens do not repeat at once."""
    sequence: Any = SEQUENCE[case.sequence].example(case.sequence_variant)
    config = page.pair(
        DEPTH[case.depth].example(case.variant),
        # The kernels of vLLM for CPUs have no heads narrower than 32, as some examples do.
        sequence.replace(head_dim=None),
        tie_embeddings=case.tied,
        **SIZES,
    )
    model = perturb(Decoder.build(config)).eval()
    with torch.no_grad():
        for module in model.blocks.modules():
            if isinstance(module, nn.Linear):
                module.weight.mul_(3.0)
    return model


def prompts() -> list[list[int]]:
    """The prompts of every case."""
    return [torch.randint(256, (size,), generator=torch.Generator().manual_seed(size)).tolist() for size in PROMPTS]


@torch.no_grad()
def alone(case: Case, folder: Path) -> Continuation:
    """Exports a model, and generates from the folder with transformers."""
    export_folder(decoder(case), folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokens, logprobs = [], []
    for prompt in prompts():
        options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
        found = model.generate(torch.tensor([prompt]), **options)
        tokens.append(found.sequences[0, len(prompt) :].tolist())
        logprobs.append(torch.stack([logits[0].log_softmax(-1).max() for logits in found.logits]))
    return Continuation(tokens, torch.stack(logprobs))


def in_vllm(folder: Path, compiled: bool) -> Continuation:
    """What vLLM generates from the folder, with all prompts at once."""
    graphs = counters["stats"]["unique_graphs"]
    engine = LLM(
        str(folder),
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=SIZES["max_seq_len"],
        max_num_batched_tokens=BATCHED,
        enable_chunked_prefill=True,
        enable_prefix_caching=False,
        max_num_seqs=len(PROMPTS) + 1,
        enforce_eager=not compiled,
    )
    try:
        greedy = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False, logprobs=1)
        given = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts()]
        outputs = [request.outputs[0] for request in engine.generate(given, greedy, use_tqdm=False)]
        if compiled and counters["stats"]["unique_graphs"] == graphs:
            raise RuntimeError("vLLM has not compiled the model")
        tokens = [list(output.token_ids) for output in outputs]
        steps = [zip(output.token_ids, output.logprobs or [], strict=True) for output in outputs]
        return Continuation(tokens, torch.tensor([[step[token].logprob for token, step in each] for each in steps]))
    finally:
        engine.llm_engine.engine_core.shutdown()
        del engine
        gc.collect()
        cleanup_dist_env_and_memory()


if __name__ == "__main__":
    raise SystemExit(main())
