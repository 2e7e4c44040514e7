"""The decoder as models of transformers; no mixer is written a second time.

Letters: B batch, T tokens of this call, S tokens so far, D width, V vocabulary, L blocks.
"""

from typing import Any, cast

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    GenerationConfig,
    GenerationMixin,
    PreTrainedModel,
    initialization,
)
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from twoaxis.core.errors import ConfigError, problem
from twoaxis.core.layout import TokenLayout
from twoaxis.core.parameters import initial_values, materialize, matrix_std
from twoaxis.interop.engines import attentions_of_blocks, check_obstacles, number_attentions, obstacles
from twoaxis.interop.hugging_face.call import recorded_reads, token_layout
from twoaxis.interop.hugging_face.configuration import TwoAxisConfig
from twoaxis.interop.hugging_face.engine_attention import (
    EngineAttention,
    builds_without_memory,
    engine_attention,
    engine_layout,
)
from twoaxis.interop.hugging_face.generation_cache import TwoAxisCache
from twoaxis.model import Decoder

CACHE = "cache" if "cache" in BaseModelOutputWithPast.__dataclass_fields__ else "past_key_values"
"""What this version of transformers calls the cache: `past_key_values` before 5.24."""

CACHE_IMPLEMENTATIONS = (None, "dynamic", "dynamic_full", "static")
"""Accepted values of `generate`; all of them are a `TwoAxisCache`."""


class TwoAxisPreTrainedModel(PreTrainedModel):
    """Base of both models: the configuration class, initial values, and what transformers may do with the modules."""

    config: TwoAxisConfig
    config_class = TwoAxisConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    _supports_attention_backend = True
    _no_split_modules = ["Block"]  # noqa: RUF012, so transformers declares it

    @classmethod
    def is_custom_code(cls) -> bool:
        """No: `_init_weights` leaves loaded values unchanged, so transformers may call it for a whole decoder."""
        return False

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Sets values that were not loaded: of a decoder as it would itself, of modules of transformers by their shape."""
        decoder = self.config.decoder_config
        if isinstance(module, Decoder):
            if module.embedding.weight.is_meta:
                return
            if not all(getattr(parameter, "_is_hf_initialized", False) for parameter in module.parameters()):
                for parameter, value in initial_values(module, self.config.init_seed):
                    initialization.copy_(parameter, value)
            _restore_buffers(module)
        elif isinstance(module, nn.Embedding):
            initialization.normal_(module.weight, std=decoder.initial_embedding_std)
        elif isinstance(module, nn.Linear):
            initialization.normal_(module.weight, std=matrix_std(decoder.base_d_model or module.in_features))

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Embedding:
        """Changes the size of the vocabulary, as in transformers.

        Raises:
            ConfigError: another size, where a mixer has a table with a row for each token.
        """
        size, multiple = new_num_tokens or self.config.vocab_size, pad_to_multiple_of or 1
        # Before transformers changes the embedding in place.
        _check_tables(cast(Any, self.base_model).decoder, -(-size // multiple) * multiple)
        return super().resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)


class TwoAxisModel(TwoAxisPreTrainedModel):
    """A decoder without its head.

    `hidden_states`, when requested, are L + 1 tensors [B T D]. Number l is what the first sublayer of block l reads from the
    depth state, before its norm: the stream itself in a plain model, as elsewhere in transformers; the mixture of sources,
    streams or channels that the depth mixer makes for this read in others; of separate queries, keys and values, the
    queries. The last one is `last_hidden_state`: what the ends of the stack read out, behind the final norm.

    Gradient checkpointing keeps the depth state between blocks and runs each block again, without reentrance; caches are
    off meanwhile.

    With an attention function that an inference engine has registered (`attn_implementation="vllm"`), the engine keeps keys and
    values: tokens of many requests come in one row, separated by the engine alone, and what else is passed to the model goes
    on to that function. What no engine can run is refused (`twoaxis.interop.engines`).

    Raises:
        ConfigError: a decoder that cannot be built, or cannot run with the attention of an engine.
    """

    def __init__(self, config: TwoAxisConfig) -> None:
        super().__init__(config)
        # The head is a module of its own, as transformers expects; `_init_weights` sets the values.
        decoder = config.decoder_config.replace(tie_embeddings=True)
        self.decoder = materialize(lambda: Decoder(decoder), torch.device("meta") if builds_without_memory() else None)
        number_attentions(self.decoder)
        self.engine_obstacles = obstacles(self.decoder)
        self.attentions = self._engine_attentions()
        self.gradient_checkpointing = False
        self._runs_in_engine()
        self.post_init()

    def get_decoder(self) -> nn.Module:
        """The part of a model that engines run and compile: this one."""
        return self

    def _engine_attentions(self) -> nn.ModuleDict:
        """The attentions that an engine computes, by block; no list, which engines would cut between devices."""
        if self.engine_obstacles:
            return nn.ModuleDict()
        blocks = enumerate(attentions_of_blocks(self.decoder))
        return nn.ModuleDict({str(index): EngineAttention(one, index, self.config) for index, (one,) in blocks})

    def _runs_in_engine(self) -> bool:
        if engine_attention(self.config._attn_implementation) is None:
            return False
        check_obstacles(self.engine_obstacles)
        return True

    def get_input_embeddings(self) -> nn.Module:
        """The embedding."""
        return self.decoder.embedding

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replaces the embedding, of a vocabulary that may have grown."""
        self.decoder.embedding = cast(nn.Embedding, value)
        self.decoder.config = self.decoder.config.replace(vocab_size=self.decoder.embedding.num_embeddings)

    @can_return_tuple
    def forward(
        self,
        input_ids: Int[Tensor, "B T"] | None = None,
        attention_mask: Shaped[Tensor, "B S"] | None = None,
        position_ids: Int[Tensor, "_ T"] | None = None,
        cache: TwoAxisCache | None = None,
        inputs_embeds: Float[Tensor, "B T D"] | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        past_key_values: TwoAxisCache | None = None,
        revocable_tokens: int | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Returns hidden states, and the cache when one is used.

        Args:
            input_ids: tokens, or None next to `inputs_embeds`.
            attention_mask: not 0 where a token is real, for all tokens so far; rows are padded on either side.
            position_ids: as in `token_layout`.
            cache: what earlier calls returned; changed in place.
            inputs_embeds: vectors in the place of embeddings.
            use_cache: whether to begin a cache when none is given; by default only outside training.
            output_hidden_states: whether to return what each block reads.
            output_attentions: must be false.
            past_key_values: the cache by its older name.
            revocable_tokens: how many of the last tokens a recording cache may be asked to remove; by default all of them.
            kwargs: passed on to the attention function of an engine, else ignored, as everywhere in transformers.

        Raises:
            ConfigError: a cache of another class, attention weights requested, more tokens than the model has positions, or a
                cache or a mask next to the attention of an engine.
        """
        if output_attentions:
            raise ConfigError(problem("output_attentions", True, "False", "attention weights are never formed; leave it out"))
        embeddings = self._embeddings(input_ids, inputs_embeds)
        if self._runs_in_engine():
            unused = (attention_mask, cache, past_key_values, use_cache, output_hidden_states)
            return self._in_engine(embeddings, engine_layout(self.attentions, position_ids, unused, kwargs).of(input_ids))
        cache = self._cache(cache, past_key_values, use_cache)
        tokens, end = embeddings.shape[1], None if cache is None else cache.end
        self._check_length(tokens + (0 if end is None else end.length))
        layout = token_layout(embeddings, attention_mask, position_ids, end)
        wanted = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        with recorded_reads(self.decoder, wanted) as reads:
            if cache is None:
                recompute = self.gradient_checkpointing and self.training
                hidden, _ = self.decoder.hidden(embeddings, layout, recompute=recompute, tokens=input_ids)
            else:
                hidden = cache.run(self.decoder, embeddings, layout, revocable_tokens or tokens, input_ids)
        # Tokens that ran again come first; counted from the front, since no tokens would be all of them from the end.
        again = hidden.shape[1] - tokens
        hidden = hidden[:, again:]
        states = (*(read[:, again:] for read in reads()), hidden) if wanted else None
        caches: dict[str, Any] = {CACHE: cache}
        return BaseModelOutputWithPast(last_hidden_state=hidden, hidden_states=states, **caches)

    def _in_engine(self, embeddings: Tensor, layout: TokenLayout) -> BaseModelOutputWithPast:
        # No check of the length, which is that of all requests together.
        hidden, _ = self.decoder.hidden(embeddings, layout)
        return BaseModelOutputWithPast(last_hidden_state=hidden)

    def _embeddings(self, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
        if inputs_embeds is not None and input_ids is None:
            return self.decoder.normalise_embeddings(inputs_embeds)
        if input_ids is None or inputs_embeds is not None:
            given = "both" if input_ids is not None else "neither"
            raise ConfigError(problem("input_ids and inputs_embeds", given, "exactly one of the two", "leave one out"))
        return self.decoder.embed(input_ids)

    def _cache(self, cache: Any, past_key_values: Any, use_cache: bool | None) -> TwoAxisCache | None:
        cache = past_key_values if cache is None else cache
        check_cache(cache)
        if self.gradient_checkpointing and self.training:
            return None
        if cache is None and (self.config.use_cache and not self.training if use_cache is None else use_cache):
            return TwoAxisCache()
        return cache

    def _check_length(self, length: int) -> None:
        limit = self.config.max_position_embeddings
        if length > limit:
            allowed = f"at most max_position_embeddings={limit}"
            raise ConfigError(problem("tokens", length, allowed, "cut the text or generate less"))


class TwoAxisForCausalLM(TwoAxisPreTrainedModel, GenerationMixin):
    """A decoder with its head, for training and for `generate`.

    Any decoding strategy of `generate` works with any mixer, with caches that are always a `TwoAxisCache`:
    `cache_implementation="static"` is accepted and means the same, since nothing here needs a fixed shape.
    """

    _tied_weights_keys = {"lm_head.weight": "model.decoder.embedding.weight"}  # noqa: RUF012, so transformers declares it

    def __init__(self, config: TwoAxisConfig) -> None:
        super().__init__(config)
        self.model = TwoAxisModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Int[Tensor, "B T"] | None = None,
        attention_mask: Shaped[Tensor, "B S"] | None = None,
        position_ids: Int[Tensor, "_ T"] | None = None,
        cache: TwoAxisCache | None = None,
        inputs_embeds: Float[Tensor, "B T D"] | None = None,
        labels: Int[Tensor, "B T"] | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        past_key_values: TwoAxisCache | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Returns logits, the loss when labels are given, and the cache when one is used.

        Args:
            input_ids: as in `TwoAxisModel.forward`, like every argument not named here.
            attention_mask: see there.
            position_ids: see there.
            cache: see there.
            inputs_embeds: see there.
            labels: the tokens themselves, which the loss shifts by one; -100 carries none.
            use_cache: see there.
            output_hidden_states: see there.
            output_attentions: see there.
            logits_to_keep: only of that many last tokens, or of these indices; 0 means of all.
            past_key_values: see there.
            kwargs: of the loss, such as `num_items_in_batch`.
        """
        revocable = logits_to_keep if isinstance(logits_to_keep, int) and logits_to_keep else None
        found = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=past_key_values if cache is None else cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
            revocable_tokens=revocable,
            return_dict=True,
        )
        hidden = found.last_hidden_state
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(hidden[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        caches = {CACHE: found[CACHE]} if CACHE in found else {}
        return CausalLMOutputWithPast(loss=loss, logits=logits, hidden_states=found.hidden_states, **caches)

    def _prepare_cache_for_generation(
        self, generation_config: GenerationConfig, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Provides a `TwoAxisCache` where `generate` would make another cache."""
        del args, kwargs
        implementation, given = generation_config.cache_implementation, model_kwargs.get(CACHE)
        if implementation not in CACHE_IMPLEMENTATIONS:
            remedy = "leave it out: these caches neither move between devices nor are quantised"
            raise ConfigError(problem("cache_implementation", implementation, "dynamic or static", remedy))
        check_cache(given)
        if given is None and generation_config.use_cache is not False:
            model_kwargs[CACHE] = TwoAxisCache()
        if given is not None:
            given._is_user_defined = True
        elif getattr(generation_config, "is_assistant", False) and CACHE in model_kwargs:
            model_kwargs[CACHE].activate_past_recording()


def check_cache(cache: Any) -> None:
    """Raises ConfigError for a cache of another class."""
    if cache is not None and not isinstance(cache, TwoAxisCache):
        remedy = "leave it out, or begin with TwoAxisCache()"
        raise ConfigError(problem("cache", type(cache).__name__, "a TwoAxisCache", remedy))


def _check_tables(decoder: Decoder, vocab_size: int) -> None:
    with torch.device("meta"):
        shapes = {name: one.shape for name, one in Decoder(decoder.config.replace(vocab_size=vocab_size)).named_parameters()}
    for name, parameter in decoder.named_parameters():
        if name != "embedding.weight" and parameter.shape != shapes[name]:
            allowed = f"{decoder.config.vocab_size}, since {name} has a row for each token"
            raise ConfigError(problem("vocab_size", vocab_size, allowed, "train a new model with this vocabulary"))


def _restore_buffers(decoder: Decoder) -> None:
    """Sets buffers that no file holds, which are undefined after loading, to what a new decoder has there."""
    saved = set(decoder.state_dict())
    missing = {name: buffer for name, buffer in decoder.named_buffers() if name not in saved}
    if missing:
        with torch.device("cpu"):
            fresh = dict(Decoder(decoder.config).named_buffers())
        for name, buffer in missing.items():
            initialization.copy_(buffer, fresh[name])


AutoModel.register(TwoAxisConfig, TwoAxisModel, exist_ok=True)
AutoModelForCausalLM.register(TwoAxisConfig, TwoAxisForCausalLM, exist_ok=True)
