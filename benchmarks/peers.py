"""The same decoder built with other libraries, behind one small interface.

Every peer is a pre-norm decoder with RMSNorm, rotary positions, SwiGLU, no biases and a tied head, in float32.
A peer that is not installed is reported and left out, never imitated.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class PeerShape:
    """The size of the model and of one training batch; the defaults are the shape that is reported."""

    n_layers: int = 12
    d_model: int = 256
    n_heads: int = 4
    d_ff: int = 688
    vocab_size: int = 512
    max_seq_len: int = 512
    batch: int = 4

    def tokens(self, seed: int = 0) -> Tensor:
        """Random training tokens [B T+1]: a step reads the first T and predicts the last T."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(self.vocab_size, (self.batch, self.max_seq_len + 1), generator=generator)


@dataclass(frozen=True)
class Peer:
    """A model of another library.

    Attributes:
        name: the library.
        model: the module whose gradients a step fills.
        logits: tokens [B T] -> logits [B T V], differentiable.
        decode: (tokens [B T], n) -> the n greedily chosen tokens [B n], computed with a cache.
        decode_compiled: the same by its own compiled step on a cache of fixed size; None where it has none.
    """

    name: str
    model: nn.Module
    logits: Callable[[Tensor], Tensor]
    decode: Callable[[Tensor, int], Tensor]
    decode_compiled: Callable[[Tensor, int], Tensor] | None = None

    def loss_step(self, tokens: Tensor) -> Tensor:
        """Runs forward and backward on tokens [B T+1] and returns the mean loss in nats per token."""
        self.model.zero_grad(set_to_none=True)
        logits = self.logits(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        return loss.detach()

    def compiled(self) -> "Peer":
        """The same weights with a compiled training step; decoding stays eager."""
        return Peer(f"{self.name} compiled", self.model, torch.compile(self.logits, dynamic=False), self.decode)


def hugging_face(shape: PeerShape) -> Peer | None:
    """`LlamaForCausalLM` of transformers, decoding with its `generate`."""
    try:
        from transformers import CompileConfig, GenerationConfig, LlamaConfig, LlamaForCausalLM
    except ImportError as error:
        return _missing("transformers", error)
    options: dict[str, Any] = {"attn_implementation": "sdpa"}
    config = LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.d_model,
        intermediate_size=shape.d_ff,
        num_hidden_layers=shape.n_layers,
        num_attention_heads=shape.n_heads,
        num_key_value_heads=shape.n_heads,
        max_position_embeddings=shape.max_seq_len,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        **options,
    )
    # Its own types leave out what it inherits.
    model: Any = LlamaForCausalLM(config)

    def logits(tokens: Tensor) -> Tensor:
        return model(input_ids=tokens, use_cache=False).logits

    @torch.inference_mode()
    def decode(tokens: Tensor, n: int) -> Tensor:
        greedy = GenerationConfig(max_new_tokens=n, min_new_tokens=n, do_sample=False, use_cache=True)
        return model.generate(tokens, attention_mask=torch.ones_like(tokens), generation_config=greedy)[:, -n:]

    @torch.no_grad()
    def decode_compiled(tokens: Tensor, n: int) -> Tensor:
        compiling: Any = CompileConfig(fullgraph=True, dynamic=False, mode="default")
        # Private; else steps are compiled on other devices only.
        compiling._compile_all_devices = True
        static: dict[str, Any] = {"cache_implementation": "static", "compile_config": compiling}
        greedy = GenerationConfig(max_new_tokens=n, min_new_tokens=n, do_sample=False, **static)
        return model.generate(tokens, attention_mask=torch.ones_like(tokens), generation_config=greedy)[:, -n:]

    return Peer("transformers", model, logits, decode, decode_compiled)


def litgpt(shape: PeerShape) -> Peer | None:
    """`GPT` of litgpt; its `generate` takes one prompt, so the same loop is written out for a batch."""
    try:
        from litgpt.config import Config
        from litgpt.model import GPT
    except ImportError as error:
        return _missing("litgpt", error)
    config = Config(
        block_size=shape.max_seq_len,
        vocab_size=shape.vocab_size,
        padded_vocab_size=shape.vocab_size,
        n_layer=shape.n_layers,
        n_head=shape.n_heads,
        n_query_groups=shape.n_heads,
        n_embd=shape.d_model,
        rotary_percentage=1.0,
        parallel_residual=False,
        bias=False,
        norm_class_name="RMSNorm",
        norm_eps=1e-6,
        mlp_class_name="LLaMAMLP",
        intermediate_size=shape.d_ff,
    )
    model: Any = GPT(config)
    model.apply(model._init_weights)
    model.lm_head.weight = model.transformer.wte.weight

    @torch.inference_mode()
    def decode(tokens: Tensor, n: int) -> Tensor:
        batch, prompt = tokens.shape
        model.set_kv_cache(batch_size=batch, max_seq_length=prompt + n)
        chosen, positions = [], torch.arange(prompt)
        for _ in range(n):
            tokens = model(tokens, input_pos=positions)[:, -1:].argmax(dim=-1)
            positions = positions[-1:] + 1
            chosen.append(tokens)
        model.clear_kv_cache()
        return torch.cat(chosen, dim=1)

    return Peer("litgpt", model, model, decode)


def x_transformers(shape: PeerShape) -> Peer | None:
    """`Decoder` of x-transformers, decoding with its `AutoregressiveWrapper`."""
    try:
        from x_transformers import AutoregressiveWrapper
    except ImportError as error:
        return _missing("x-transformers", error)
    model = x_transformers_model(shape)
    wrapper = AutoregressiveWrapper(model)

    @torch.inference_mode()
    def decode(tokens: Tensor, n: int) -> Tensor:
        return wrapper.generate(tokens, n, temperature=0.0, cache_kv=True)

    return Peer("x-transformers", model, model, decode)


def x_transformers_model(shape: PeerShape, **options: bool) -> Any:
    """The decoder of x-transformers at this shape, with further options of its `Decoder`."""
    from x_transformers import Decoder, TransformerWrapper

    layers = Decoder(
        dim=shape.d_model,
        depth=shape.n_layers,
        heads=shape.n_heads,
        attn_dim_head=shape.d_model // shape.n_heads,
        attn_flash=True,
        rotary_pos_emb=True,
        use_rmsnorm=True,
        ff_glu=True,
        ff_swish=True,
        ff_no_bias=True,
        ff_mult=shape.d_ff / shape.d_model,
        **options,
    )
    return TransformerWrapper(
        num_tokens=shape.vocab_size,
        max_seq_len=shape.max_seq_len,
        attn_layers=layers,
        tie_embedding=True,
        use_abs_pos_emb=False,
    )


BUILDERS: dict[str, Callable[[PeerShape], Peer | None]] = {
    "transformers": hugging_face,
    "litgpt": litgpt,
    "x-transformers": x_transformers,
}


def peers(shape: PeerShape) -> list[Peer]:
    """Every installed peer at this shape, in a fixed order."""
    return [peer for build in BUILDERS.values() if (peer := build(shape)) is not None]


def training_step(name: str, shape: PeerShape) -> Callable[[], Tensor]:
    """One training step of one peer, for `measure.peak_memory`, which builds it in a process of its own."""
    peer = BUILDERS[name](shape)
    if peer is None:
        raise ValueError(f"{name!r} is not installed")
    tokens = shape.tokens()
    return lambda: peer.loss_step(tokens)


def _missing(name: str, error: ImportError) -> None:
    print(f"{name} is left out: {error}; install benchmarks/requirements-peers.txt", file=sys.stderr)
