"""The Transformer (Vaswani et al. 2017, figure 1), and its encoder-only and decoder-only forms.

Shapes: B batch, S source, T target, L either, D model, V vocabulary.

    source ids -> embedding -> Encoder ---- memory ----+
    target ids -> embedding -> Decoder (shifted right) -+-> classifier -> logits (B, T, V)
"""

from __future__ import annotations

import onnx_ir as ir
from onnxscript import nn

from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.parameters import output_weight_name, source_embedding_name, target_embedding_name

from .attention import Attention, MakeAttention
from .cache import Cache
from .classifier import Classifier, Product
from .feedforward import ACTIVATIONS
from .layers import Decoder, Encoder, Tap, no_tap, within
from .marks import Role
from .masks import causal_padding_mask, padding_mask
from .norms import make_norm
from .positions import positions_of
from .primitives import Embedding, Linear, Op, Parameter, name_parameters, size
from .rows import Rows, take


class Transformer(nn.Module):
    """Built from a config; the parameters are filled from a checkpoint when a graph is written (`package/write.py`).

    Ids are (B, L) int64. Masks are (B, L) int64, 1 on tokens and 0 on padding, which may be on either side.
    `inputs_embeds` (B, S, D) replace the source ids: vectors like the embedding's rows times `config.embedding_factor`.
    """

    def __init__(self, config: TransformerConfig, attention: MakeAttention = Attention):
        super().__init__()
        self.config = config
        looked_up = config.architecture == "encoder" and (config.own_classifier or not config.head.classifies)
        role = Role.LOOKED_UP if looked_up else Role.EMBEDDING
        if config.one_embedding:
            self.embedding = Embedding(config.vocab_size, config.d_model, role)
        else:
            if config.has_encoder:
                self.source_embedding = Embedding(config.source_vocab_size, config.d_model, role)
            if config.has_decoder:
                self.target_embedding = Embedding(config.vocab_size, config.d_model, role)
        if config.token_types:
            self.token_type_embedding = Embedding(config.token_types, config.d_model, Role.ADDED)
        if config.has_encoder:
            self.encoder = Encoder(config, attention)
        if config.has_decoder:
            self.decoder = Decoder(config, attention)
        if config.head.activation:
            self.head_proj = Linear(config.d_model, config.d_model, config.head.bias)
        if config.head.norm:
            self.head_norm = make_norm(config)
        if config.own_classifier:
            self.output_proj = Linear(config.d_model, config.outputs, config.output_bias, Role.CLASSIFIER)
        elif config.output_bias:
            self.output_proj = OutputBias(config)
        name_parameters(self)

    def encode(
        self,
        op: Op,
        source_ids: ir.Value | None,
        source_mask: ir.Value,
        *,
        inputs_embeds: ir.Value | None = None,
        token_types: ir.Value | None = None,
        tap: Tap = no_tap,
    ) -> ir.Value:
        """The encoder's output, the memory (B, S, D), for source_ids (B, S) or inputs_embeds (B, S, D)."""
        first = inputs_embeds if source_ids is None else source_ids
        assert first is not None
        x = self.embedded(op, source_ids, inputs_embeds=inputs_embeds, token_types=token_types)
        position_ids = positions_of(op, size(op, first, 1), source_mask)
        if self.config.causal:
            mask = causal_padding_mask(op, source_mask, position_ids.distances)  # (B, 1, S, S)
        else:
            mask = padding_mask(op, source_mask)  # (B, 1, 1, S)
        return self.encoder(op, x, position_ids, mask, within(tap, "encoder"))

    def step(self, op: Op, ids: ir.Value, cache: Cache, *, among: Product | None = None, tap: Tap = no_tap) -> ir.Value:
        """Logits (B, L, V) of the tokens after `ids` (B, L). Extends the cache's layers by L positions.

        among: a product with the classifier's rows of chosen ids, for their logits (B, L, C).
        """
        x = self.embed_target(op, ids)  # (B, L, D)
        position_ids = cache.position_ids(op, ids)
        mask = cache.self_mask(op, position_ids)
        scope = within(tap, "decoder")
        x = self.decoder(op, x, position_ids, mask, cache.cross, cache.cross_mask, cache.layers, scope)  # (B, L, D)
        return self.logits(op, x, among=among, tap=tap)

    def transformed(self, op: Op, memory: ir.Value, weights: ir.Value | None = None, *, tap: Tap = no_tap) -> ir.Value:
        """The head before its classifier: pooling by `weights` (B, 1, S), if given, then dense layer, activation, norm.

        Returns (B, S, D), or (B, D) if pooled.
        """
        head = self.config.head
        x = memory if weights is None else op.Reshape(op.MatMul(op.CastLike(weights, memory), memory), [0, -1])
        if head.activation is None:
            return x
        x = ACTIVATIONS[head.activation](op, self.head_proj(op, x))
        x = self.head_norm(op, x) if head.norm else x
        tap("head", x)
        return x

    def logits(self, op: Op, hidden: ir.Value, *, among: Product | None = None, tap: Tap = no_tap) -> ir.Value:
        """Project hidden states to logits: (B, L, D) -> (B, L, V), or (B, L, C) with `among`.

        Returns the hidden states if the head has no classifier.
        """
        y = hidden
        if self.config.head.classifies:
            y = self.classifier(among)(op, hidden)
        tap("logits", y)
        return y

    def classifier(self, among: Product | None = None) -> Classifier:
        """Maps hidden states to the logits of all ids, or of the chosen ids of the product `among`."""
        return Classifier(self.config, self.product if among is None else among)

    def product(self, op: Op, x: ir.Value) -> ir.Value:
        """x W^T + b: (B, L, D) -> (B, L, V), with the classifier's own matrix or a tied embedding."""
        if self.config.own_classifier:
            return self.output_proj(op, x)
        y = self._output().as_linear(op, x)
        return self.output_proj(op, y) if self.config.output_bias else y

    def output_rows(self, op: Op, ids: ir.Value) -> Rows:
        """Gather the classifier's rows of chosen ids (C,): the product that gives their logits."""
        weight = take(op, self.output_weight, ids)
        if not self.config.output_bias:
            return Rows(weight, None)
        bias = self.output_proj.bias
        assert bias is not None
        bias._realize(op.builder)
        return Rows(weight, op.Gather(bias, ids, axis=0))

    @property
    def output_weight(self) -> Parameter:
        """The classifier's matrix (V, D), its own or a tied embedding."""
        return self._output().weight

    def embedded(
        self,
        op: Op,
        source_ids: ir.Value | None,
        *,
        inputs_embeds: ir.Value | None = None,
        token_types: ir.Value | None = None,
    ) -> ir.Value:
        """The encoder's input (B, S, D): embedded ids or `inputs_embeds`, plus the embedding of their token types."""
        x = inputs_embeds if source_ids is None else self.embed_source(op, source_ids)
        assert x is not None
        return x if token_types is None else self._with_types(op, x, token_types)

    def _with_types(self, op: Op, x: ir.Value, token_types: ir.Value) -> ir.Value:
        return op.Add(x, self.token_type_embedding(op, token_types))

    def embed_source(self, op: Op, ids: ir.Value) -> ir.Value:
        """(B, S) -> (B, S, D), times `embedding_factor` (section 3.4)."""
        return self._embed(op, source_embedding_name(self.config), ids)

    def embed_target(self, op: Op, ids: ir.Value) -> ir.Value:
        return self._embed(op, target_embedding_name(self.config), ids)

    def _embed(self, op: Op, name: str, ids: ir.Value) -> ir.Value:
        x = getattr(self, name.removesuffix(".weight"))(op, ids)
        return op.Mul(x, self.config.embedding_factor) if self.config.scale_embeddings else x

    def _output(self) -> Embedding:
        """The module whose weight is the output matrix: `output_proj`, or the tied embedding."""
        return getattr(self, output_weight_name(self.config).removesuffix(".weight"))


class OutputBias(nn.Module):
    """The output bias of a classifier whose matrix is a tied embedding."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.bias = Parameter([config.outputs])

    def forward(self, op: Op, y: ir.Value) -> ir.Value:
        return op.Add(y, self.bias)
