"""Parts of other families by hand count, presets, and every way to name a model."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twoaxis.core.cost import Cost, Shape
from twoaxis.core.errors import ConfigError
from twoaxis.core.position import LayerStack
from twoaxis.depth import AttentionResidualsConfig, MUDDFormerConfig, ResidualScalarsConfig
from twoaxis.feed_forward import GELUConfig, SwiGLUConfig
from twoaxis.model import DecoderConfig
from twoaxis.model.cost import decoder_cost
from twoaxis.planner.formulas.roofline import weights_read
from twoaxis.planner.model import ModelShape, NativeSublayer, Part, preset_names, read_model
from twoaxis.planner.model.compressed_attention import CompressedAttention, Compressor, Indexer
from twoaxis.planner.model.latent_attention import KimiDeltaAttention, LatentAttention
from twoaxis.planner.model.part import Biased, Experts
from twoaxis.sequence import AttentionConfig

EXAMPLES = Path(__file__).parents[2] / "examples" / "models"

SITE = LayerStack(32, 1e-6, (1,)).sites[0]
LATENT = LatentAttention(n_heads=4, kv_rank=16, q_rank=20, nope_dim=8, rope_dim=4, value_dim=12)
DELTA = KimiDeltaAttention(n_heads=3, head_dim=8, kernel=4)
SPARSE = CompressedAttention(4, 16, 20, 4, window=6, groups=2, output_rank=12, compressor=Compressor(4, Indexer(3, 8, top_k=2)))
HEAVY = CompressedAttention(4, 16, 20, 4, window=6, groups=2, output_rank=12, compressor=Compressor(8))
EXPERTS = Experts(width=32, n_experts=8, per_token=2, d_expert=24, d_shared=24, router="corrected")
PARTS: dict[str, Part] = {
    "latent": LATENT,
    "absorbed": LATENT.in_generation(),
    "delta": DELTA,
    "sparse": SPARSE,
    "heavy": HEAVY,
    "window": CompressedAttention(4, 16, 20, 4, window=6, groups=2, output_rank=12),
    "experts": EXPERTS,
    "latent experts": Experts(16, 8, 2, 24, latent="rms", shared_gate="none"),
    "biased": Biased(GELUConfig(d_ff=48), 80),
}

PRESETS = {
    # Billions of parameters, as the sources of the presets state them.
    "ddl-medium": 0.353,
    "ddl-small": 0.1236,
    "dense-70b": 70.554,
    "dense-7b": 6.738,
    "denseformer-48": 0.37845,
    "gpt-124m": 0.124,
    "kimi-linear-48b-a3b": 49.1,
    "mhc-27b": 27.0,
    "moe-1t": 1026.4,
    "muddformer-1.3b": 1.43,
    "muddformer-2.8b": 2.8049,
    "muddformer-6.9b": 6.9,
    "olmo-1b": 1.1768,
    "olmo-7b": 6.888,
}


def params(model: ModelShape) -> int:
    return decoder_cost(model, Shape(1, 1)).params


def written(tmp_path: Path, name: str, text: str) -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


@pytest.mark.parametrize("name", PARTS)
@given(batch=st.integers(1, 3), tokens=st.integers(1, 64))
def test_costs_are_whole_and_grow_with_the_batch(name: str, batch: int, tokens: int) -> None:
    one, many = (PARTS[name].cost(SITE, Shape(rows, tokens, 2)) for rows in (1, batch))
    for field in ("params", "matmul_flops", "pair_flops", "elementwise_flops", "saved_bytes", "cache_bytes"):
        assert isinstance(getattr(many, field), int), field
    assert many.params == one.params and many.matmul_flops == batch * one.matmul_flops
    assert abs(many.pair_flops - batch * one.pair_flops) < batch and many.cache_bytes == batch * one.cache_bytes


@pytest.mark.parametrize("name", PARTS)
def test_costs_of_one_more_token_change_only_at_declared_windows(name: str) -> None:
    part, rates = PARTS[name], 8
    # Entries grow by 1/m per token: at these widths in whole numbers.
    costs = [part.cost(SITE, Shape(1, tokens, 2)) for tokens in range(40)]
    for edge in range(2, 39):
        if edge - 1 not in part.windows:
            cache = [costs[edge + step].cache_bytes for step in (-2, -1, 0)]
            assert abs(cache[2] - 2 * cache[1] + cache[0]) <= rates * 2, edge
            seen = [costs[edge + step].pair_flops - costs[edge + step - 1].pair_flops for step in (-1, 0, 1)]
            assert abs(seen[2] - 2 * seen[1] + seen[0]) <= 2 or edge in part.windows, edge


def test_experts_count_what_a_token_is_sent_to() -> None:
    expert, router = 3 * 32 * 24, 8 * 32
    assert EXPERTS.cost(SITE, Shape(1, 1)).params == 9 * expert + router + 8
    assert EXPERTS.cost(SITE, Shape(1, 1)).matmul_flops == 2 * (3 * expert + router)
    routed = [EXPERTS.routed.experts, EXPERTS.routed.used, EXPERTS.routed.params]
    numbers = {"params": EXPERTS.cost(SITE, Shape(1, 1)).params, "routed": routed, "tables": 0}
    assert weights_read(numbers, 1) == 3 * expert + router + 8
    # Two tokens meet at one of two experts each with probability 1/4.
    assert weights_read(numbers, 2) == pytest.approx(expert * (1 + 8 * (1 - 0.75**2)) + router + 8)
    assert weights_read(numbers, 10**6) == pytest.approx(numbers["params"])


def test_latent_experts_work_between_two_maps() -> None:
    plain = Experts(16, 8, 2, 24, latent="plain")
    assert plain.cost(SITE, Shape(1, 1)).params == 8 * 3 * 16 * 24 + 2 * 32 * 16 + 8 * 32
    assert PARTS["latent experts"].cost(SITE, Shape(1, 1)).params == plain.cost(SITE, Shape(1, 1)).params + 16


def test_more_experts_per_token_than_there_are_is_refused() -> None:
    with pytest.raises(ConfigError, match="experts per token=9: must be at most 8 experts; lower it"):
        Experts(32, 8, 9, 24)


def test_the_absorbed_form_changes_the_pairs_alone() -> None:
    shape = Shape(2, 10, 2)
    wide, absorbed = LATENT.cost(SITE, shape), LATENT.in_generation().cost(SITE, shape)
    assert wide.pair_flops == 2 * 4 * (12 + 12) * 2 * 55
    assert absorbed.pair_flops == 2 * 4 * (16 + 4 + 16) * 2 * 55
    assert wide + Cost(pair_flops=absorbed.pair_flops) == absorbed + Cost(pair_flops=wide.pair_flops)


def test_a_delta_rule_keeps_a_state_of_fixed_size() -> None:
    caches = [DELTA.cost(SITE, Shape(1, tokens, 2)).cache_bytes for tokens in (0, 1, 3, 1000)]
    state, taps = 3 * 8 * 8 * 4, 3 * 24 * 2
    assert caches == [state, state + taps, state + 3 * taps, state + 3 * taps]
    assert DELTA.cost(SITE, Shape(1, 50)).pair_flops == 50 * 6 * 8 * 8 * 3


@pytest.mark.parametrize("part", [SPARSE, HEAVY], ids=["sparse", "heavy"])
@given(tokens=st.integers(1, 200))
def test_entries_that_grow_are_less_than_one_too_many(part: CompressedAttention, tokens: int) -> None:
    made = part.compressor
    assert made is not None
    top_k, scoring = (made.indexer.top_k, 2 * 3 * (8 + 1)) if made.indexer else (tokens, 0)
    closed = [(t + 1) // made.rate for t in range(tokens)]
    seen = sum(4 * 4 * 16 * (min(t + 1, part.window) + min(n, top_k)) + scoring * n for t, n in enumerate(closed))
    most = seen + tokens * (4 * 4 * 16 + scoring)
    assert seen <= part.cost(SITE, Shape(1, tokens)).pair_flops <= most


def test_the_cache_of_entries_grows_by_their_share_of_a_token() -> None:
    per_token = [
        part.cost(SITE, Shape(1, 1800, 2)).cache_bytes - part.cost(SITE, Shape(1, 1000, 2)).cache_bytes
        for part in (SPARSE, HEAVY)
    ]
    assert per_token == [200 * (16 + 8) * 2, 100 * 16 * 2]


def test_biases_count_once() -> None:
    config = GELUConfig(d_ff=48)
    assert Biased(config, 80).cost(SITE, Shape(1, 3)) == NativeSublayer(config).cost(SITE, Shape(1, 3)) + Cost(
        80, elementwise_flops=240
    )


def test_an_own_decoder_costs_as_a_model_what_it_costs_as_a_decoder() -> None:
    data = {"depth": "attention_residuals", "blocks": [["short_swa", "attention", "gelu"]]}
    config = DecoderConfig.from_data({"vocab_size": 64, "d_model": 32, "n_layers": 3} | data)
    shape = Shape(2, 17, 2)
    assert decoder_cost(ModelShape.of_decoder(config), shape) == decoder_cost(config, shape)


@pytest.mark.parametrize("local", ["local_swa", "branch_swa"])
def test_windows_of_chunks_are_refused(local: str) -> None:
    mixed = {"kind": "gated_delta_net", "projected_local": {"kind": local, "window_kind": "chunk"}}
    config = DecoderConfig.from_data({"vocab_size": 8, "d_model": 16, "n_layers": 1, "blocks": [[mixed]]})
    with pytest.raises(ConfigError, match="window_kind='chunk': must be 'sliding' in a plan, which counts tokens and visible"):
        ModelShape.of_decoder(config, "chunks")


def test_a_sublayer_that_does_not_fit_the_width_is_refused() -> None:
    with pytest.raises(ConfigError, match="n_heads=5: must be a divisor of d_model=32"):
        ModelShape("odd", 64, 32, ((NativeSublayer(AttentionConfig(n_heads=5)), NativeSublayer(SwiGLUConfig())),))


def test_depth_mixers_meet_parts_of_other_families() -> None:
    model = ModelShape("latent", 64, 32, ((LATENT, EXPERTS),) * 2)
    assert params(model.with_depth(AttentionResidualsConfig())) > params(model)
    # A key of 4 numbers per token, from every sublayer.
    keyed = model.with_depth(AttentionResidualsConfig(key_rank=4))
    site, plain = keyed.stack.sites[0], model.stack.sites[0]
    assert LATENT.cost(site, Shape(1, 1)).params == LATENT.cost(plain, Shape(1, 1)).params + 4 * 12 * 4
    with pytest.raises(ConfigError, match="reads separate q, k and v before 'latent_attention'"):
        model.with_depth(MUDDFormerConfig())


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_the_parameters_of_its_source(name: str) -> None:
    assert params(read_model(name)) / 1e9 == pytest.approx(PRESETS[name], rel=0.005)


def test_presets_name_their_source() -> None:
    assert set(preset_names()) == set(PRESETS)
    folder = Path(read_model.__code__.co_filename).parent / "presets"
    assert all("arXiv" in path.read_text() or "et al." in path.read_text() for path in folder.iterdir())


@pytest.mark.parametrize("path", sorted(EXAMPLES.iterdir()), ids=lambda path: path.name)
def test_an_example_is_read(path: Path) -> None:
    assert read_model(path).name == path.stem


def test_a_recipe_is_read_with_its_vocabulary(tmp_path: Path) -> None:
    text = "steps = 5\n[model]\nd_model = 32\nn_layers = 2\n"
    assert read_model(written(tmp_path, "recipe.toml", text + "vocab_size = 64\n")).vocab_size == 64
    with pytest.raises(ConfigError, match="vocab_size is missing: a plan reads no tokenizer"):
        read_model(written(tmp_path, "without.toml", text))


def test_a_folder_is_read_and_gives_its_name(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    with pytest.raises(ConfigError, match=r"the folder holds no config\.json"):
        read_model(folder)
    written(folder, "config.json", json.dumps({"vocab_size": 64, "d_model": 32, "n_layers": 1}))
    assert read_model(folder).name == read_model(str(folder / "config.json")).name == "my-model"


def test_a_model_of_ours_that_was_exported_is_read(tmp_path: Path) -> None:
    theirs = {"model_type": "twoaxis", "vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 3, "depth": "deep_delta"}
    (tmp_path / "config.json").write_text(json.dumps(theirs))
    found = read_model(tmp_path)
    assert (found.d_model, found.n_layers, found.depth.kind) == (16, 3, "deep_delta")
    with pytest.raises(ConfigError, match=r"model weights.gguf: must be a config.json"):
        read_model("weights.gguf")


def test_a_record_of_an_older_version_is_planned_as_it_was_trained(tmp_path: Path) -> None:
    sizes = {"vocab_size": 64, "d_model": 16, "n_layers": 3, "depth": {"kind": "residual_scalars"}}
    exported = {"model_type": "twoaxis", "vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 3, "depth": sizes["depth"]}
    own = tmp_path / "own"
    own.mkdir()
    assert read_model(written(own, "config.json", json.dumps(sizes))).depth == ResidualScalarsConfig()
    (own / "tokenizer.json").write_text("{}")
    for folder in (own, tmp_path):
        if folder == tmp_path:
            written(folder, "config.json", json.dumps(exported))
        assert read_model(folder).depth == ResidualScalarsConfig(embedding="raw")


def test_a_name_that_is_nothing_gets_the_nearest_preset() -> None:
    with pytest.raises(ConfigError, match=r"model 'dense-7': is no file, no folder and no preset; did you mean 'dense-7b'\?"):
        read_model("dense-7")


@pytest.mark.parametrize(
    "name, text, message",
    [
        ("a.toml", "steps = 3", "must hold a Hugging Face config"),
        ("a.json", '{"model": 3}', "must hold a Hugging Face config"),
        ("a.toml", "d_model = -1\nn_layers = 1\nvocab_size = 2", "d_model=-1: must be >= 1"),
        ("a.toml", "d_model = 8\nn_layers = 1\nn_layer = 1\nvocab_size = 2", "did you mean 'n_layers'?"),
        ("a.toml", "d_model = = 1", "is not toml"),
    ],
)
def test_a_bad_file_is_one_line_that_names_it(tmp_path: Path, name: str, text: str, message: str) -> None:
    path = written(tmp_path, name, text)
    with pytest.raises(ConfigError) as caught:
        read_model(path)
    assert message in str(caught.value) and str(path) in str(caught.value) and "\n" not in str(caught.value)
