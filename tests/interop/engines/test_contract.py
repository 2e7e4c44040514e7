"""Inside an engine with attention of its own, a model computes what it computes alone: the contract of vLLM's backend.

The engine is a small one of the tests (`engine.py`); vLLM itself does not run here.
"""

import ast
import inspect
import json
import os
import textwrap
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra twoaxis[hf]")

from safetensors.torch import load_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from twoaxis import DEPTH, SEQUENCE, ConfigError, Decoder, DecoderConfig
from twoaxis.cli import main
from twoaxis.core.measure import perturb
from twoaxis.data.tokenizer import ByteTokenizer
from twoaxis.interop.engines import obstacles
from twoaxis.interop.hugging_face import TwoAxisCache, TwoAxisConfig, TwoAxisForCausalLM, TwoAxisModel, to_hugging_face
from twoaxis.sequence.heads import SoftmaxAttention
from twoaxis.train import save_trained

from ...fresh import run_fresh
from ..hf_models import small_decoder
from .outside_engine import NAME, Engine, Work

REQUESTS = {"A": [3, 1, 4, 1, 5, 9, 2, 6, 5], "B": [2, 7, 1, 8, 2, 8], "C": [0, 5, 7, 7, 2, 1, 5]}
# A prompt in two chunks, then single tokens of some requests beside prompts of others, and a page that fills within a call.
STEPS = [
    [("A", 4)],
    [("A", 2), ("B", 3)],
    [("A", 1), ("B", 1), ("C", 2)],
    [("B", 1), ("C", 4), ("A", 1)],
    [("C", 1), ("A", 1), ("B", 1)],
]
SEQUENCES = [
    *(("attention", "mha"), ("short_swa", "window4"), ("attention", "gqa"), ("short_swa", "zero_output")),
    *(("attention", "mqa"), ("short_swa", "window1"), ("attention", "window"), ("short_swa", "window4"), ("attention", "bias")),
]

# Options of a depth mixer with which it remembers tokens, as no engine does.
TOKEN_HISTORY = {"compressor": "time", "expansion": "embedding_conv"}


def runs(kind: str, options: Mapping[str, Any]) -> bool:
    """Whether an engine can run a depth mixer with these options; slots are keys that no engine has."""
    fills_slots = kind == "mixture_of_depths_attention" and options.get("weights") != "off"
    return not fills_slots and not TOKEN_HISTORY.items() & options.items()


def pairs() -> list[Any]:
    """The first and last variant of each depth mixer, with variants of the sequence axis in turn; each kind with each."""
    found = []
    for start, row in enumerate(DEPTH):
        able = [name for name, options in row.examples.items() if runs(row.kind, options)]
        for turn, index in enumerate((0, len(able) - 1)):
            kind, variant = SEQUENCES[(2 * (start % 4) + turn) % len(SEQUENCES)]
            case = (row.kind, able[index], kind, variant)
            found.append(pytest.param(*case, id="-".join(case)))
    return found


def in_float64(config: DecoderConfig) -> Decoder:
    return perturb(Decoder.build(config).double()).eval()


def run(engine: Engine) -> dict[str, torch.Tensor]:
    """Logits of every request, from calls that hold tokens of several."""
    got: dict[str, list[torch.Tensor]] = {name: [] for name in REQUESTS}
    for step in STEPS:
        done = {name: sum(map(len, got[name])) for name in REQUESTS}
        works = [Work(name, REQUESTS[name][done[name] :][:count]) for name, count in step]
        for name, logits in engine.step(works).items():
            got[name].append(logits)
    return {name: torch.cat(logits) for name, logits in got.items()}


@torch.no_grad()
def check(engine: Engine, decoder: Decoder) -> None:
    for name, logits in run(engine).items():
        alone = decoder(torch.tensor([REQUESTS[name]]))[0]
        assert logits.shape == alone.shape
        torch.testing.assert_close(logits, alone, rtol=0, atol=1e-10)


@pytest.mark.parametrize(("depth", "example", "sequence", "variant"), pairs())
def test_pair_computes_in_the_engine_what_it_computes_alone(depth, example, sequence, variant):
    blocks: Any = [[SEQUENCE[sequence].example(variant), "swiglu"]]
    decoder = in_float64(
        DecoderConfig(vocab_size=11, d_model=8, n_layers=2, depth=DEPTH[depth].example(example), blocks=blocks)
    )
    model = to_hugging_face(decoder)
    check(Engine(model.config, model.state_dict()), decoder)


def test_every_pair_of_kinds_that_can_run_is_there():
    tested = {(depth, sequence) for depth, _, sequence, _ in (case.values for case in pairs())}
    assert tested == {(row.kind, kind) for row in DEPTH for kind in ("attention", "short_swa")}


SWA = {"kind": "short_swa", "n_heads": 4, "n_kv_heads": 2, "window": 3}


@pytest.fixture(scope="module")
def mixed() -> Decoder:
    """Full attention and windows; the tokens of a call are more than one document may have."""
    blocks = [[SWA], [{"kind": "attention", "n_heads": 4, "n_kv_heads": 2}, "swiglu"], ["swiglu", SWA]]
    sizes = {"vocab_size": 11, "d_model": 16, "n_layers": 3, "max_seq_len": 9}
    return in_float64(DecoderConfig.from_data({**sizes, "depth": "mhc", "blocks": blocks}))


@pytest.mark.parametrize("tie", [True, False])
def test_saved_folder_loads_by_names(tie, mixed, tmp_path):
    decoder = in_float64(mixed.config.replace(tie_embeddings=tie))
    to_hugging_face(decoder).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    assert all(name.startswith("model.decoder.") or name == "lm_head.weight" for name in weights)
    assert ("lm_head.weight" in weights) == (not tie)
    config = AutoConfig.from_pretrained(tmp_path)
    assert config.architectures == ["TwoAxisForCausalLM"] and not hasattr(config, "auto_map")
    check(Engine(config, weights), decoder)


def test_fixed_parts(mixed):
    config = to_hugging_face(mixed).config
    assert config.get_text_config() is config
    assert config.layer_types == ["sliding_attention", "full_attention", "sliding_attention"] and config.sliding_window == 3
    shape = (config.num_attention_heads, config.num_key_value_heads, config.head_dim)
    assert (shape, config.hidden_size, config.num_hidden_layers, config.vocab_size) == ((4, 2, 4), 16, 3, 11)
    assert TwoAxisModel.is_backend_compatible() and TwoAxisForCausalLM.is_backend_compatible()
    model: Any = Engine(config, to_hugging_face(mixed).state_dict()).model
    assert isinstance(model, TwoAxisModel) and model.base_model_prefix == "model" and model.get_decoder() is model
    assert {"input_ids", "inputs_embeds", "position_ids"} <= inspect.signature(TwoAxisModel.forward).parameters.keys()
    attentions = list(model.attentions.values())
    assert [attention.layer_idx for attention in model.modules() if isinstance(attention, SoftmaxAttention)] == [0, 1, 2]
    assert [module.layer_idx for module in attentions] == [0, 1, 2] and all(module.is_causal for module in attentions)
    assert [module.sliding_window for module in attentions] == [3, None, 3]
    assert {(m.num_heads, m.num_key_value_heads, m.head_dim) for m in attentions} == {shape}
    assert [module.scaling for module in attentions] == [0.5, 0.5, 0.5]
    # Pipelines need a list of blocks right here, and so are refused instead of cut where a depth state is more than a tensor.
    assert [name for name, _ in model.named_children()] == ["decoder", "attentions"]
    assert not any(isinstance(child, torch.nn.ModuleList) for child in model.children())


def test_source_of_one_module_per_block_calls_a_registered_function(mixed):
    # vLLM 0.32 finds the attention of a block, and its scale, by reading the source of every module's `forward`.
    model, found = to_hugging_face(mixed).model, []
    for module in model.modules():
        tree = ast.parse(textwrap.dedent(inspect.getsource(type(module).forward)))
        looked_up = {
            target.id
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Subscript)
            and ast.unparse(node.value.value) == "ALL_ATTENTION_FUNCTIONS"
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) in looked_up]
        if len(calls) == 1:
            scaling = next(ast.unparse(word.value) for word in calls[0].keywords if word.arg == "scaling")
            found.append((module.layer_idx, eval(scaling, {"self": module}), module.config is model.config))
    assert found == [(0, 0.5, True), (1, 0.5, True), (2, 0.5, True)]


def test_requests_do_not_see_each_other(mixed):
    model = to_hugging_face(mixed)
    engine, alone = Engine(model.config, model.state_dict()), Engine(model.config, model.state_dict())
    together = engine.step([Work("A", REQUESTS["A"]), Work("B", REQUESTS["B"])])
    torch.testing.assert_close(together["B"], alone.step([Work("B", REQUESTS["B"])])["B"], rtol=0, atol=1e-12)


def test_embeddings_may_come_in_the_place_of_tokens(mixed):
    model = to_hugging_face(mixed)
    engine = Engine(model.config, model.state_dict())
    expected = engine.step([Work("A", REQUESTS["A"])])["A"]
    again = Engine(model.config, model.state_dict())
    again.step([Work("A", REQUESTS["A"])])
    embeddings = again.model.get_input_embeddings()(torch.tensor([REQUESTS["A"]]))
    options: dict[str, Any] = {"attention_instances": again.attention_instances, "return_dict": False, "use_cache": False}
    hidden, *_ = again.model(inputs_embeds=embeddings, position_ids=torch.arange(9)[None], **options)
    torch.testing.assert_close(hidden[0] @ again.head.T, expected)


def test_refused_when_the_model_is_built_or_switched(mixed):
    decoder = small_decoder("states")
    config = TwoAxisConfig.from_decoder(decoder.config)
    config._attn_implementation = NAME
    with pytest.raises(ConfigError, match="'deep_delta': cannot run in another engine, since"):
        AutoModel.from_config(config)
    model = to_hugging_face(decoder).model
    assert model.engine_obstacles == obstacles(decoder)
    model.set_attn_implementation(NAME)
    with pytest.raises(ConfigError, match="cannot run in another engine"):
        model(torch.tensor([[1, 2]]), position_ids=torch.tensor([[0, 1]]))


@pytest.mark.parametrize(
    "given",
    [
        {"attention_mask": torch.ones(1, 2)},
        {"use_cache": True},
        {"past_key_values": TwoAxisCache()},
        {"output_hidden_states": True},
        {"position_ids": None},
    ],
    ids=lambda given: next(iter(given)),
)
def test_what_the_engine_keeps_may_not_be_passed(given, mixed):
    model = to_hugging_face(mixed)
    engine = Engine(model.config, model.state_dict())
    call = {"input_ids": torch.tensor([[1, 2]]), "position_ids": torch.tensor([[0, 1]]), **given}
    with pytest.raises(ConfigError, match="keeps keys and values itself"):
        engine.model(**call, attention_instances=engine.attention_instances)


def test_heads_cut_among_devices_are_refused(mixed):
    model = to_hugging_face(mixed)
    engine = Engine(model.config, model.state_dict())
    for attention in engine.attention_instances.values():
        attention.num_heads = 2
    with pytest.raises(ConfigError, match="tensor-parallel-size 1"):
        engine.step([Work("A", [1, 2])])


def test_heads_cut_in_a_layer_that_an_engine_attaches_are_refused(mixed):
    # vLLM 0.32 passes no layers along.
    attention: Any = to_hugging_face(mixed).model.attentions["1"]
    attention.check_heads(None)
    attention.attn = torch.nn.Module()
    vars(attention.attn)["num_heads"] = 2
    with pytest.raises(ConfigError, match="tensor-parallel-size 1"):
        attention.check_heads(None)


@pytest.mark.parametrize("name", ["paged|eager", "sdpa", "flex_attention"])
def test_functions_of_transformers_are_refused(name, mixed):
    config = TwoAxisConfig.from_decoder(mixed.config)
    with pytest.raises((ConfigError, ValueError), match=r"must be 'eager'|does not support"):
        AutoModelForCausalLM.from_config(config, attn_implementation=name)


class _Leaves(torch.fx.Tracer):
    """Follows a module's own computation, as engines do to find norms that they have faster kernels for."""

    def is_leaf_module(self, m: torch.nn.Module, module_qualified_name: str) -> bool:
        return True


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("name", ["plain", "windows", "views", "streams"])
def test_no_norm_looks_like_one_without_a_gain(name, grad):
    # What looks like a norm is replaced by one whose gain is called `weight`: ours would be lost.
    for module in {type(module): module for module in to_hugging_face(small_decoder(name)).modules()}.values():
        tracer = _Leaves()
        with torch.set_grad_enabled(grad), suppress(Exception):
            tracer.trace(module)
        targets = [str(node.target) for node in getattr(tracer, "graph", torch.fx.Graph()).nodes]
        assert not [target for target in targets if "rms_norm" in target or "rsqrt" in target], type(module)


def test_config_file_says_what_engines_read(mixed, tmp_path):
    to_hugging_face(mixed).config.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["model_type"] == "twoaxis" and written["sliding_window"] == 3
    assert written["layer_types"] == ["sliding_attention", "full_attention", "sliding_attention"]


def test_compiles_as_one_graph(mixed):
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def first_values(
        module: Any, query: Any, key: Any, value: Any, mask: Any, attention_instances: Any = None, **kwargs: Any
    ) -> Any:
        repeats = query.shape[1] // value.shape[1]
        return value.repeat_interleave(repeats, dim=1).transpose(1, 2).flatten(0, 1).flatten(1), None

    ALL_ATTENTION_FUNCTIONS.register("first_values", first_values)
    model: Any = to_hugging_face(mixed).model
    model.set_attn_implementation("first_values")
    compiled = torch.compile(model, backend="eager", fullgraph=True, dynamic=True)
    with torch.no_grad():
        for tokens in ([[1, 2, 3, 4]], [[1, 2, 3, 4, 5, 6]]):
            call = {"input_ids": torch.tensor(tokens), "position_ids": torch.tensor([[0, 1, 0, 1, 2, 3][: len(tokens[0])]])}
            options: dict[str, Any] = {"use_cache": False, "attention_instances": {}, "return_dict": False}
            torch.testing.assert_close(compiled(**call, **options)[0], model(**call, **options)[0])


def test_export_for_engines(mixed, tmp_path, capsys):
    save_trained(tmp_path / "run", Decoder.build(mixed.config.replace(vocab_size=256)), ByteTokenizer())
    for engine in ("vllm", "sglang"):
        assert main(["export", str(tmp_path / "run"), "--to", engine, "--out", str(tmp_path / engine)]) == 0
        assert capsys.readouterr().out.endswith(f"for {engine}\n")
    assert [path.name for path in (tmp_path / "vllm").glob("*.py")] == []
    # A program that has never heard of twoaxis.
    load = "from transformers import AutoModel; import sys; m = AutoModel.from_pretrained(sys.argv[1], trust_remote_code=True)"
    environment = {**os.environ, "HF_HOME": str(tmp_path / "home")}
    done = run_fresh(f"{load}; print(type(m).__module__)", str(tmp_path / "sglang"), env=environment)
    assert done.stdout == "twoaxis.interop.hugging_face.modeling\n", done.stderr
    save_trained(tmp_path / "states", small_decoder("states", vocab_size=256).float(), ByteTokenizer())
    assert main(["export", str(tmp_path / "states"), "--to", "vllm", "--out", str(tmp_path / "no")]) == 2
    assert "'deep_delta': cannot run in another engine" in capsys.readouterr().err and not (tmp_path / "no").exists()
