"""One module of twoaxis in a Llama of Hugging Face: `python examples/drop_in/llama.py`.

`add_depth` and `add_short_swa` change a plain model in place and leave what it computes as it was. `state_dict` has what is
new; for both axes at once, folders that `from_pretrained` reads, and a cache for ShortSWA, let `twoaxis retrofit` and
`twoaxis export` build the model.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm

from twoaxis import AttentionResidualsConfig, DeepDeltaConfig, DepthAxis, DepthConfig, ShortSWA, TokenLayout

ATTENTION_RESIDUALS = AttentionResidualsConfig(mixture="sum")
"""Each sublayer reads all outputs before it; at first their sum."""

DEEP_DELTA = DeepDeltaConfig(blend="annealed")
"""The shortcut becomes a delta write, blended in by a weight per sublayer that begins at 0 and is learned."""


class Layer(LlamaDecoderLayer):
    """A layer of the model with its modules and weights, of a class of our own."""

    def __init__(self, layer: LlamaDecoderLayer, config: LlamaConfig) -> None:
        with torch.device("meta"):
            super().__init__(config, layer.self_attn.layer_idx)
        self._modules.update(layer._modules)
        self.train(layer.training)


def plain_layers(model: LlamaForCausalLM) -> list[LlamaDecoderLayer]:
    """The layers, none of which has been changed: what a changed one adds would be lost."""
    for index, layer in enumerate(model.model.layers):
        if type(layer) is not LlamaDecoderLayer:
            got = f"layers[{index}]={type(layer).__name__}"
            raise ValueError(f"{got}: must be LlamaDecoderLayer; change a plain model, or add both axes by `twoaxis retrofit`")
    return list(model.model.layers)


class DepthLayer(Layer):
    """Reads and writes the state of the depth axis, which goes from layer to layer in the place of the hidden states."""

    def __init__(self, layer: LlamaDecoderLayer, config: LlamaConfig, axis: DepthAxis) -> None:
        super().__init__(layer, config)
        self.before_attn, self.before_mlp = axis.blocks[self.self_attn.layer_idx]
        # The ends belong to the last layer; the first one only calls them.
        self.enter = axis.enter if layer.self_attn.layer_idx == 0 else None
        self.ends = axis.ends if layer.self_attn.layer_idx == config.num_hidden_layers - 1 else None

    def forward(self, hidden_states: Any, **kwargs: Any) -> Any:
        state = hidden_states if self.enter is None else self.enter(hidden_states)
        state = self.before_attn(state, self.input_layernorm, lambda context: self.self_attn(context, **kwargs)[0])
        state = self.before_mlp(state, self.post_attention_layernorm, self.mlp)
        return state if self.ends is None else self.ends.leave(state)[0]


def add_depth(model: LlamaForCausalLM, depth: DepthConfig) -> None:
    """Gives the model another depth axis, which works on single tokens, so that generation needs no other cache."""
    axis = DepthAxis(depth, model.config.hidden_size, model.config.num_hidden_layers, norm_eps=model.config.rms_norm_eps)
    for index, layer in enumerate(plain_layers(model)):
        model.model.layers[index] = DepthLayer(layer, model.config, axis)
    axis.to(device=model.device, dtype=model.dtype)


class ShortSWALayer(Layer):
    """A short window comes before attention, with a norm and weights of its own."""

    def __init__(self, layer: LlamaDecoderLayer, config: LlamaConfig, window: int) -> None:
        super().__init__(layer, config)
        self.short_norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.short_swa = ShortSWA(d_model=config.hidden_size, window=window, output_init="zero")

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        # The cache is called `cache` from transformers 5.24 on.
        if kwargs.get("cache", kwargs.get("past_key_values")) is not None:
            raise ValueError("use_cache=True: must be False, since the cache of Llama has no room for ShortSWA; leave it out")
        update, _ = self.short_swa(self.short_norm(hidden_states), self.layout(kwargs["position_ids"], len(hidden_states)))
        return super().forward(hidden_states + update, **kwargs)

    @staticmethod
    def layout(positions: Tensor, batch: int) -> TokenLayout:
        """A token belongs to the text of the one before it when their positions follow each other: padding never does."""
        begins = positions.diff(dim=1, prepend=positions[:, :1] - 1) != 1
        return TokenLayout(positions, begins.cumsum(1).expand(batch, -1) if begins.any() else None)


def add_short_swa(model: LlamaForCausalLM, window: int = 16) -> None:
    """Adds a ShortSWA to each layer, whose output starts at zero; the model then generates without a cache."""
    for index, layer in enumerate(plain_layers(model)):
        model.model.layers[index] = changed = ShortSWALayer(layer, model.config, window)
        for new in (changed.short_norm, changed.short_swa):
            new.to(device=model.device, dtype=model.dtype)
    model.config.use_cache = model.generation_config.use_cache = False

    def number_texts(_module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Positions that begin behind the padding, as `generate` has them, for a forward pass with a mask alone."""
        mask = kwargs.get("attention_mask")
        if kwargs.get("position_ids") is None and mask is not None and mask.ndim == 2:
            kwargs["position_ids"] = (mask.long().cumsum(1) - 1).masked_fill(mask == 0, 0)
        return args, kwargs

    model.model.register_forward_pre_hook(number_texts, with_kwargs=True)


if __name__ == "__main__":
    small = LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4)
    text = torch.tensor([list(b"Each layer reads what the layers before it have written.")])
    for add, option in ((add_depth, ATTENTION_RESIDUALS), (add_depth, DEEP_DELTA), (add_short_swa, 16)):
        model = LlamaForCausalLM(small)
        before = model(text).logits
        add(model, option)
        difference = (model(text).logits - before).abs().max().item()
        optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), []
        for _ in range(5):
            losses.append(model(text, labels=text).loss)
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        name = getattr(option, "kind", "short_swa")
        print(f"{name}: logits differ by {difference:.0e}; losses", [round(loss.item(), 2) for loss in losses])
