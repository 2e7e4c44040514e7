"""Identities of Deep Delta Learning: what beta does to the error, one channel inside four, and tokens in any pieces."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from twoaxis.core.cost import Shape
from twoaxis.core.errors import ConfigError
from twoaxis.core.layout import TokenLayout
from twoaxis.core.parameters import initialise
from twoaxis.depth import DeepDelta, DeepDeltaConfig
from twoaxis.depth.deep_delta import PRESETS
from twoaxis.ledger.stack import trace_stack
from twoaxis.model import Decoder
from twoaxis.model.block import RMSNorm
from twoaxis.testing.decoding import decode
from twoaxis.testing.measured import sublayer_list, trace
from twoaxis.testing.toy import ATTENTION, D_MODEL, FEED_FORWARD, noise, perturb, toy_decoder, toy_tokens

TIME = DeepDeltaConfig(value_channels=3, compressor="time", expansion="embedding_conv")
CHANNEL = DeepDeltaConfig(value_channels=3, compressor="channel", value_target="code")
CONFIGS = [
    pytest.param(DeepDeltaConfig(), id="one"),
    pytest.param(DeepDeltaConfig(value_target="code"), id="one, target of the code"),
    pytest.param(CHANNEL, id="channel"),
    pytest.param(TIME, id="time"),
]


def mixer(config: DeepDeltaConfig, beta: float | None = None) -> DeepDelta:
    """A mixer away from its initial values, by request with the same gate for every token; beta may be 0, 1 or 2."""
    made = DeepDelta(config, D_MODEL)
    initialise(made, 0)
    perturb(made.double())
    if beta is not None:
        with torch.no_grad():
            made.gate.weight.zero_()
            made.gate.bias.fill_(torch.logit(torch.tensor(beta / 2, dtype=torch.float64)).item())
    return made


def inputs(config: DeepDeltaConfig) -> tuple[Any, Tensor, Tensor]:
    """A state, an update and a context."""
    state = [noise((2, 3, D_MODEL), f"channel {c}") for c in range(config.value_channels)]
    return (tuple(state) if len(state) > 1 else state[0]), noise((2, 3, D_MODEL), "update"), noise((2, 3, D_MODEL), "context")


def errors(made: DeepDelta, state: Any, update: Tensor, target: Tensor) -> Tensor:
    """target - k^T x of every channel."""
    k = update / update.norm(dim=-1, keepdim=True)
    channels = state if isinstance(state, tuple) else (state,)
    targets = target if target.ndim == 3 else target.unsqueeze(0)
    return torch.stack([v - (k * x).sum(-1) for v, x in zip(targets, channels, strict=True)])


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("beta", [0.0, 0.25, 1.0, 1.5, 2.0])
def test_a_write_contracts_the_error_by_one_minus_beta(config: DeepDeltaConfig, beta: float) -> None:
    made = mixer(config.replace(direction_eps=1e-150), beta)
    state, update, context = inputs(config)
    _, carry, _ = made.read(state)
    target = made.target(state if carry is None else carry, context)
    before = errors(made, state, update, target)
    written = made.write(state, update, context, carry)
    after = errors(made, written, update, target)
    torch.testing.assert_close(after, (1 - beta) * before, rtol=1e-12, atol=1e-13)
    # Across the direction nothing moves.
    k = update / update.norm(dim=-1, keepdim=True)
    for old, new in zip(*(x if isinstance(x, tuple) else (x,) for x in (state, written)), strict=True):
        across_old, across_new = (x - (k * x).sum(-1, keepdim=True) * k for x in (old, new))
        torch.testing.assert_close(across_new, across_old, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("config", CONFIGS)
def test_a_closed_gate_is_the_identity(config: DeepDeltaConfig) -> None:
    made = mixer(config, beta=0.0)
    state, update, context = inputs(config)
    written = made.write(state, update, context, made.read(state)[1])
    for old, new in zip(*(x if isinstance(x, tuple) else (x,) for x in (state, written)), strict=True):
        assert torch.equal(old, new)


def test_four_channels_of_which_the_first_is_read_are_one_channel() -> None:
    """CC without EC, read = e_0 and weight 1 at tap (C-1)//2 only: column 0 runs as the model of one channel."""
    one = toy_decoder(DeepDeltaConfig())
    four = toy_decoder(DeepDeltaConfig(value_channels=4, compressor="channel"))
    values = dict(one.named_parameters())
    with torch.no_grad():
        for name, parameter in four.named_parameters():
            if name.endswith("read_weight"):
                parameter.copy_(torch.eye(4)[0])
            elif name.endswith(("compressor.weight", "readout.weight")):
                parameter.copy_(torch.eye(4)[(4 - 1) // 2])
            elif name.endswith(("target_weight", "target_bias")):
                parameter[0].copy_(values[name].view_as(parameter[0]))
            else:
                parameter.copy_(values[name])
    tokens = toy_tokens()
    torch.testing.assert_close(four(tokens), one(tokens), rtol=0, atol=1e-13)
    for ours, theirs in zip(trace(four, tokens).states, trace(one, tokens).states, strict=True):
        torch.testing.assert_close(ours[0], theirs, rtol=0, atol=1e-13)


def test_the_channel_read_by_its_definition() -> None:
    C = 5
    made = mixer(DeepDeltaConfig(value_channels=C, compressor="channel"))
    state, *_ = inputs(made.config)
    compressor: Any = made.compressor
    expected = torch.zeros_like(state[0])
    for r in range(C):
        for j in range(C):
            tap = j - r + (C - 1) // 2
            if 0 <= tap < C:
                expected += compressor.read_weight[r] * compressor.weight[:, tap] * state[j]
    torch.testing.assert_close(made.read(state)[0], expected, rtol=1e-12, atol=1e-13)


def test_embeddings_start_as_equal_channels() -> None:
    embeddings = noise((2, 4, D_MODEL), "embeddings")
    ends = TIME.build(toy_decoder(TIME).config.stack)[1]
    initialise(ends, 0)
    assert all(torch.equal(channel, embeddings) for channel in ends.double().enter(embeddings)[0])


@pytest.mark.parametrize("blocks", [((ATTENTION,),), ((FEED_FORWARD, ATTENTION, FEED_FORWARD),)], ids=["one", "three"])
def test_the_sublayers_of_a_block_share_one_compressor(blocks: Any) -> None:
    model = toy_decoder(TIME, n_layers=2, blocks=blocks)
    owners = [name for name, _ in model.named_parameters() if name.endswith("compressor.weight")]
    assert len(owners) == 2
    for block in model.blocks:
        first, *others = (sublayer.depth for sublayer in block.sublayers)  # type: ignore[union-attr]
        assert all(other.compress is first.compressor for other in others)


@given(data=st.data())
@settings(max_examples=20)
def test_any_chunks_of_packed_rows(data: st.DataObject) -> None:
    """Prompts shorter than the kernel and documents that begin within a chunk or at its border included."""
    tokens = 9
    lengths = data.draw(st.lists(st.integers(1, 4), min_size=3, max_size=9))
    documents = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[:tokens]
    documents = torch.cat((documents, documents.new_full((tokens - len(documents),), len(lengths)))).expand(2, -1)
    cuts = sorted(data.draw(st.sets(st.integers(1, tokens - 1))))
    chunks = [stop - start for start, stop in zip([0, *cuts], [*cuts, tokens], strict=True)]
    layout = TokenLayout.packed(documents)
    with torch.no_grad():
        full = MODEL(toy_tokens(), layout)
        torch.testing.assert_close(decode(MODEL, toy_tokens(), chunks, layout), full, rtol=0, atol=1e-11)


MODEL = toy_decoder(TIME, n_layers=2)


@pytest.mark.parametrize("prompt", [1, 2, 3, 5])
def test_two_continuations_of_one_cache(prompt: int) -> None:
    stem, branches = toy_tokens(tokens=prompt), [toy_tokens(tokens=4, seed=seed) for seed in (1, 2)]
    with torch.no_grad():
        _, start = MODEL(stem, None, MODEL.new_cache())
        caches, logits = [start, start], ([], [])
        for step in range(4):
            for n, branch in enumerate(branches):
                got, caches[n] = MODEL(branch[:, step : step + 1], None, caches[n])
                logits[n].append(got)
        for n, branch in enumerate(branches):
            whole = MODEL(torch.cat((stem, branch), dim=1))[:, prompt:]
            torch.testing.assert_close(torch.cat(logits[n], dim=1), whole, rtol=0, atol=1e-11)


def test_a_channel_cache_is_a_copy_of_the_last_tokens() -> None:
    time, channel = (trace_stack(config, MODEL.config.stack, Shape(2, 100)) for config in (TIME, CHANNEL))
    assert [operation.cache for operation in time.sublayers] == [2 * 3 * TIME.value_channels * D_MODEL * 4] * len(
        time.sublayers
    )
    assert not any(operation.cache for operation in channel.sublayers)


def test_parameters_of_the_published_sizes() -> None:
    """The counts of the authors' 124M models: 36,912, 264,364 and 144,556 more than the plain one.

    Their code has a bias for each of the C targets of 24 sublayers, the target of their text has none.
    """
    stack = toy_decoder(DeepDeltaConfig()).config.replace(d_model=768, n_layers=12).stack
    shape = Shape(1, 1)
    for preset, released in [("ddl", 36_912), ("ddl_tc_ec", 264_364), ("ddl_cc_ec", 144_556)]:
        for target, biases in [("code", 24), ("paper", 0)]:
            config = DeepDeltaConfig.from_data({"preset": preset, "value_target": target})
            total = sum(config.cost(site, shape).params for site in stack.sites) + config.ends_cost(stack, shape).params
            assert total == released - (24 - biases) * config.value_channels


def test_a_preset_is_the_published_form_and_nothing_else() -> None:
    """Channels, compressor and embedding convolution of the repository's files, and the eps of all of their norms."""
    forms = {
        "ddl": (1, "none", "repeat"),
        "ddl_tc": (4, "time", "repeat"),
        "ddl_tc_ec": (4, "time", "embedding_conv"),
        "ddl_cc": (4, "channel", "repeat"),
        "ddl_cc_ec": (4, "channel", "embedding_conv"),
    }
    assert set(forms) == set(PRESETS) - {"none"}
    for preset, form in forms.items():
        config = DeepDeltaConfig.from_data({"preset": preset})
        assert (config.value_channels, config.compressor, config.expansion) == form
        assert (config.value_target, config.gate, config.beta_init) == ("paper", "linear", 1.0)
        assert DeepDeltaConfig.from_data(config.to_data()) == config
        model = toy_decoder(config)
        norms = {name: module.eps for name, module in model.named_modules() if isinstance(module, RMSNorm)}
        assert set(norms.values()) == {1e-5} and "norm" in norms and model.config.norm_eps != 1e-5
        assert {sublayer.mixer.norm_eps for sublayer in sublayer_list(model) if hasattr(sublayer.mixer, "norm_eps")} == {1e-5}


def test_the_default_target_is_linear_in_the_context_alone() -> None:
    made = mixer(DeepDeltaConfig())
    state, _, context = inputs(made.config)
    expected = context @ made.target_weight
    torch.testing.assert_close(made.target(state, context), expected, rtol=1e-13, atol=0)
    assert torch.equal(made.target(2 * state, context), made.target(state, context))
    assert not hasattr(made, "target_bias")


def test_the_bias_of_the_first_gate_layer() -> None:
    biased = mixer(DeepDeltaConfig(gate="two_layer_bias", gate_width=5))
    bare = mixer(DeepDeltaConfig(gate="two_layer", gate_width=5))
    *_, context = inputs(biased.config)
    gate = biased.gate
    hidden = torch.tanh(context @ gate.hidden_weight.T + gate.hidden_bias)
    expected = 2 * torch.sigmoid(hidden @ gate.weight + gate.bias)
    torch.testing.assert_close(gate(context), expected, rtol=1e-13, atol=0)
    bare.gate.load_state_dict({name: value for name, value in gate.state_dict().items() if name != "hidden_bias"})
    assert not torch.allclose(bare.gate(context), gate(context))
    with torch.no_grad():
        gate.hidden_bias.zero_()
    assert torch.equal(bare.gate(context), gate(context))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"value_channels": 4}, "compressor='none': must be given for value_channels=4; use 'channel' or 'time'"),
        ({"compressor": "time"}, "compressor='time': must be left out with value_channels=1"),
        ({"expansion": "embedding_conv"}, "expansion='embedding_conv': must be left out with value_channels=1"),
        ({"value_channels": 0}, "value_channels"),
        ({"beta_init": 2.0}, "beta_init=2.0"),
        ({"preset": "ddl_cc", "compressor": "time"}, "compressor='time': must be 'channel' with preset='ddl_cc'; leave one"),
        ({"preset": "ddl", "context_eps": 1e-6}, "context_eps=1e-06: must be 1e-05 with preset='ddl'; leave one of the two"),
        ({"preset": "ddl", "blend": "annealed"}, "context_eps=1e-05: must be left out with a blend"),
        ({"preset": "ddl_ct"}, "did you mean 'ddl_tc'"),
        ({"kernel_size": 3}, "kernel_size=3: must be left out, since nothing is convolved along positions; remove it, or use"),
        ({"value_channels": 2, "compressor": "channel", "kernel_size": 3}, "kernel_size=3: must be left out"),
        ({"gate_width": 5}, "gate_width=5: must be left out, since a linear gate has no hidden layer; remove it, or use"),
    ],
)
def test_impossible_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DeepDeltaConfig.from_data(options)


def test_one_token_and_one_channel_row() -> None:
    model: Decoder = toy_decoder(TIME, n_layers=1)
    one = model(toy_tokens(batch=1, tokens=1))
    assert one.shape[:2] == (1, 1) and one.isfinite().all()
