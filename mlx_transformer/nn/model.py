"""The Transformer (Vaswani et al. 2017, figure 1), and its encoder-only and decoder-only forms.

Shapes: B batch, S source, T target, L either, D model, V vocabulary.

    source ids -> embedding -> Encoder ---- memory ----+
    target ids -> embedding -> Decoder (shifted right) -+-> classifier -> logits (B, T, V)
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn

from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.parameters import (
    output_weight_name,
    parameter_count,
    source_embedding_name,
    target_embedding_name,
)
from mlx_transformer.core.positions import borders
from mlx_transformer.page import table
from mlx_transformer.system.errors import UserError

from .attention import Attention, MakeAttention
from .cache import Cache, empty_layers, mask_heads
from .classifier import Classifier
from .feedforward import ACTIVATIONS
from .inputs import Ids, Tokens, Vectors, as_ids, as_tokens, as_vectors, check_one_input, padding_before
from .layers import Decoder, Encoder, Tap, no_tap, within
from .masks import Mask, causal_padding_mask, document_mask, padding_mask, pooling_weights
from .norms import make_norm
from .parameters import initialise, stored_weights
from .positions import positions_after, positions_in_documents, positions_of


class Transformer(nn.Module):
    """A model with fresh weights, which depend on `mx.random.seed`. It is in training mode until `eval()`.

    - Ids (B, L): lists or NumPy integers (values are checked, `UserError`), or an `mx.array` (values are not checked).
    - Masks (B, L): True on tokens, False on padding, which may be on the left or right. None: no padding.
    - `inputs_embeds` (B, L, D): vectors in place of the first stack's ids, e.g. of a picture's patches, on the scale of
      embedding rows times `config.embedding_factor`. Positions and dropout are applied as for ids.
    - `tap(name, array)` is called at every named point (`layers.py`).

    In float16 or bfloat16 (`set_dtype`) activations have that type too.
    """

    cache_bits: int | None = None
    """Bits of the integers that self-attention's cached keys and values are rounded to; None: they aren't."""

    def __init__(self, config: TransformerConfig, attention: MakeAttention = Attention):
        super().__init__()
        self.config = config
        if config.one_embedding:
            self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        else:
            if config.has_encoder:
                self.source_embedding = nn.Embedding(config.source_vocab_size, config.d_model)
            if config.has_decoder:
                self.target_embedding = nn.Embedding(config.vocab_size, config.d_model)
        if config.token_types:
            self.token_type_embedding = nn.Embedding(config.token_types, config.d_model)
        if config.has_encoder:
            self.encoder = Encoder(config, attention)
        if config.has_decoder:
            self.decoder = Decoder(config, attention)
        if config.head.activation:
            self.head_proj = nn.Linear(config.d_model, config.d_model, config.head.bias)
        if config.head.norm:
            self.head_norm = make_norm(config)
        if config.own_classifier:
            self.output_proj = nn.Linear(config.d_model, config.outputs, config.output_bias)
        elif config.output_bias:
            self.output_proj = OutputBias(config)
        initialise(self, config)

    def _repr_html_(self) -> str:
        """Number of parameters and main options, as HTML for notebooks."""
        return table(f"Transformer: {parameter_count(self.config):,} parameters", self.config.summary().items())

    def __call__(self, *inputs: Any, tap: Tap | None = None, **named: Any) -> mx.array:
        """Teacher-forced logits (B, T, V); from an encoder-only model the output of its head (`core/heads.py`).

        Encoder-decoder: model(source_ids, target_ids, source_mask=None)
        Encoder-only, decoder-only: model(ids, mask=None)
        Decoder-only, several documents in a row: model(ids, segments=segments), e.g. segments [[0, 0, 0, 1, 1]]
        Vectors in place of the first ids: model(inputs_embeds=vectors), other arguments by name
        """
        return self.logits(self.hidden(*inputs, tap=tap, **named), tap=tap)

    def hidden(self, *inputs: Any, tap: Tap | None = None, **named: Any) -> mx.array:
        """The classifier's input: (B, T, D), or (B, D) if the head pools each row. Arguments as for `__call__`."""
        shapes = {
            "encoder-decoder": self._hidden_encoder_decoder,
            "encoder": self._hidden_encoder,
            "decoder": self._hidden_decoder,
        }
        return shapes[self.config.architecture](*inputs, tap=tap, **named)

    def _hidden_encoder_decoder(
        self,
        source_ids: Ids | None = None,
        target_ids: Ids = (),
        source_mask: Tokens | None = None,
        *,
        inputs_embeds: Vectors | None = None,
        tap: Tap | None = None,
    ) -> mx.array:
        memory = self.encode(source_ids, source_mask, inputs_embeds=inputs_embeds, tap=tap)
        tokens = as_tokens(source_mask, memory.shape[:2], "source_mask")
        return self._hidden_decode(target_ids, memory, tokens, tap)

    def _hidden_encoder(
        self,
        source_ids: Ids | None = None,
        source_mask: Tokens | None = None,
        *,
        inputs_embeds: Vectors | None = None,
        token_types: Ids | None = None,
        tap: Tap | None = None,
    ) -> mx.array:
        memory = self.encode(source_ids, source_mask, inputs_embeds=inputs_embeds, token_types=token_types, tap=tap)
        tokens = as_tokens(source_mask, memory.shape[:2], "source_mask")
        if self.config.head.per_row:
            tokens = mx.ones(memory.shape[:2], mx.bool_) if tokens is None else tokens
            weights = pooling_weights(tokens, self.config.head.pooling)
            return self.transformed(memory, weights.astype(memory.dtype), tap=tap)
        return self.transformed(memory, tap=tap)

    def _hidden_decoder(
        self,
        ids: Ids | None = None,
        mask: Tokens | None = None,
        segments: mx.array | None = None,
        *,
        inputs_embeds: Vectors | None = None,
        tap: Tap | None = None,
    ) -> mx.array:
        x = self._embedded(ids, inputs_embeds, "ids")
        tokens = as_tokens(mask, x.shape[:2], "mask", causal=not borders(self.config))  # longrope counts tokens
        position_ids = positions_of(x.shape[1], tokens) if segments is None else positions_in_documents(segments)
        self_mask: Mask = "causal" if tokens is None else causal_padding_mask(tokens)
        self_mask = self_mask if segments is None else document_mask(segments)
        return self.decoder(x, position_ids, self_mask, tap=within(tap or no_tap, "decoder"))

    def encode(
        self,
        source_ids: Ids | None = None,
        source_mask: Tokens | None = None,
        *,
        inputs_embeds: Vectors | None = None,
        token_types: Ids | None = None,
        tap: Tap | None = None,
    ) -> mx.array:
        """The encoder's output, the memory (B, S, D).

        source_mask: None if there is no padding; faster than an `mx.array` of True.
        token_types (B, S): e.g. BERT's 0 for the first sentence and 1 for the second. Default: all 0.
        """
        self._needs("has_encoder", "encode")
        x = self._with_types(self._embedded(source_ids, inputs_embeds, "source_ids"), token_types)
        causal = self.config.causal
        tokens = as_tokens(source_mask, x.shape[:2], "source_mask", causal)
        if tokens is None:
            mask: Mask = "causal" if causal else None
        else:
            mask = causal_padding_mask(tokens) if causal else padding_mask(tokens)
        return self.encoder(x, positions_of(x.shape[1], tokens), mask, within(tap or no_tap, "encoder"))

    def _embedded(self, ids: Ids | None, vectors: Vectors | None, name: str) -> mx.array:
        """Input of the first stack (B, L, D): the embeddings of ids, or `vectors`."""
        c = self.config
        check_one_input(ids, vectors, name)
        if vectors is not None:
            layer: Any = (self.encoder if c.has_encoder else self.decoder).layers[0]
            norm = layer.feed_forward_norm or layer.feed_forward_post_norm
            return as_vectors(vectors, c.d_model, norm.weight.dtype)
        embed, size = (self.embed_source, c.source_vocab_size) if c.has_encoder else (self.embed_target, c.vocab_size)
        return embed(as_ids(ids, size, name))

    def _with_types(self, x: mx.array, token_types: Ids | None) -> mx.array:
        """Add the embeddings of token types to x (B, S, D)."""
        kinds, shape = self.config.token_types, tuple(x.shape[:2])
        if not kinds:
            if token_types is not None:
                raise UserError("token_types: the model reads none; leave them out")
            return x
        ids = mx.zeros(shape, mx.int32) if token_types is None else as_ids(token_types, kinds, "token_types")
        if tuple(ids.shape) != shape:
            raise UserError(f"token_types: their shape {tuple(ids.shape)} differs from that of the input, {shape}")
        return x + self.token_type_embedding(ids)

    def decode(
        self, target_ids: Ids, memory: mx.array, source_mask: Tokens | None = None, *, tap: Tap | None = None
    ) -> mx.array:
        """Logits (B, T, V) of the token after each position. target_ids start with bos and are padded on the right."""
        tokens = as_tokens(source_mask, memory.shape[:2], "source_mask")
        return self.logits(self._hidden_decode(target_ids, memory, tokens, tap), tap=tap)

    def _hidden_decode(self, target_ids: Ids, memory: mx.array, tokens: mx.array | None, tap: Tap | None) -> mx.array:
        self._needs("has_decoder", "decode")
        target_ids = as_ids(target_ids, self.config.vocab_size, "target_ids")
        x = self.embed_target(target_ids)
        cross = self.decoder.cross_keys_values(memory)
        cross_mask = None if tokens is None else padding_mask(tokens)
        position_ids = positions_of(target_ids.shape[1])
        return self.decoder(x, position_ids, "causal", cross, cross_mask, tap=within(tap or no_tap, "decoder"))

    def start(
        self, memory: mx.array | None = None, source_mask: Tokens | None = None, *, prompt_mask: Tokens | None = None
    ) -> Cache:
        """An empty cache for `step`. Encoder-decoder: pass the memory (B, S, D) and its mask.

        prompt_mask (B, L), decoder-only: True on tokens of the prompts, which are padded on the left.
        """
        self._needs("has_decoder", "start")
        c = self.config
        starts = None if prompt_mask is None else padding_before(prompt_mask, "prompt_mask")
        if memory is None:
            if c.has_encoder:
                raise UserError("start: an encoder-decoder decodes from a memory; pass model.encode(source_ids)")
            return Cache(empty_layers(c, self.cache_bits), starts=starts)
        tokens = as_tokens(source_mask, memory.shape[:2], "source_mask")
        cross = self.decoder.cross_keys_values(memory)
        return Cache(empty_layers(c, self.cache_bits), cross, tokens, mask_heads(c), starts)

    def step(
        self, ids: Ids, cache: Cache, *, last: bool = False, among: Classifier | None = None, tap: Tap | None = None
    ) -> mx.array:
        """Logits (B, L, V) of the tokens after `ids` (B, L): one token per row, or a whole prompt. Extends the cache.

        last: logits (B, 1, V) of the last position only, e.g. after a prompt.
        among: a classifier of candidate ids, for their logits (B, L, C).
        """
        ids = as_ids(ids, self.config.vocab_size, "ids")
        length = ids.shape[1]
        x = self.embed_target(ids)
        mask = cache.self_mask(length, mask_heads(self.config))
        position_ids = positions_after(cache.offset, length, cache.starts)
        scope = within(tap or no_tap, "decoder")
        x = self.decoder(x, position_ids, mask, cache.cross, cache.cross_mask, cache.layers, scope)
        cache.offset += length
        return self.logits(x[:, -1:] if last else x, among=among, tap=tap)

    def transformed(self, memory: mx.array, weights: mx.array | None = None, *, tap: Tap | None = None) -> mx.array:
        """The head before its classifier: pooling by `weights` (B, 1, S), if given, then dense layer, activation, norm.

        Returns (B, S, D), or (B, D) if pooled.
        """
        head = self.config.head
        x = memory if weights is None else (weights @ memory)[:, 0]  # (B, D)
        if head.activation is None:
            return x
        x = ACTIVATIONS[head.activation](self.head_proj(x))
        x = self.head_norm(x) if head.norm else x
        if tap is not None:
            tap("head", x)
        return x

    def logits(self, hidden: mx.array, *, among: Classifier | None = None, tap: Tap | None = None) -> mx.array:
        """Project hidden states to logits: (B, L, D) -> (B, L, V), or (B, L, C) with the classifier `among`.

        Returns the hidden states if the head has no classifier.
        """
        y = hidden
        if self.config.head.classifies:
            y = (self.classifier() if among is None else among)(hidden)
        if tap is not None:
            tap("logits", y)
        return y

    def classifier(self) -> Classifier:
        """The classifier, with the current parameters."""
        bias = self.output_proj.bias if self.config.output_bias else None
        return Classifier(self.config, self._output(), bias)

    def embed_source(self, ids: mx.array) -> mx.array:
        """(B, S) -> (B, S, D), times `embedding_factor` (section 3.4)."""
        return self._embed(source_embedding_name(self.config), ids)

    def embed_target(self, ids: mx.array) -> mx.array:
        return self._embed(target_embedding_name(self.config), ids)

    def _embed(self, name: str, ids: mx.array) -> mx.array:
        x = self[name.removesuffix(".weight")](ids)
        return x * self.config.embedding_factor if self.config.scale_embeddings else x

    def _output(self) -> nn.Embedding | nn.Linear:
        """The module whose weight is the output matrix: `output_proj`, or the tied embedding."""
        return self[output_weight_name(self.config).removesuffix(".weight")]

    def weights(self) -> dict[str, np.ndarray]:
        """Every parameter by name as a NumPy array, ready for `save_checkpoint`; bfloat16 is ml_dtypes'."""
        return stored_weights(self)

    def _needs(self, part: str, method: str) -> None:
        if not getattr(self.config, part):
            raise UserError(f"{method}: a model of architecture {self.config.architecture!r} cannot {method}")


class OutputBias(nn.Module):
    """The output bias of a classifier whose matrix is a tied embedding."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.bias = mx.zeros((config.outputs,))
