"""The request that graphs are made for: a model, and what was asked of its package. No ONNX here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from mlx_transformer.core.config import TransformerConfig

if TYPE_CHECKING:
    from mlx_transformer.core.pooling import Kind
    from mlx_transformer.core.text_embedding import TextEmbedding

CROSS_ATTENTION = "cross_attention"
"""The name of the decoders' optional output `attention` (rows, T, S): from where in the source one layer read each
token's row. Also its key in mlx_transformer.json."""
INPUTS_EMBEDS = "inputs_embeds"
"""The key in mlx_transformer.json of a folder whose encoder reads vectors."""
DIMENSIONS = "dimensions"
"""The key in mlx_transformer.json of a folder whose vectors are cut."""
BY_TOKEN = "row_per_token"
"""The key in mlx_transformer.json of a folder whose encoder alone has a row for each token."""
SENTENCE_EMBEDDING = "sentence_embedding"
"""The name of an encoder's optional output `vector` (rows, W), a text's, and its key in mlx_transformer.json."""
TEXT_OUTPUTS: dict[Kind, str] = {"dense": SENTENCE_EMBEDDING, "sparse": "token_weights", "multi": "token_vectors"}
"""All such outputs by what they give of a text; of its tokens (rows, L) and (rows, L, W), 0 on padding, and `multi` on
the first token too."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """The request that graphs are made for: a model, and what was asked of its package."""

    config: TransformerConfig
    inputs_embeds: bool = False
    """The encoder reads vectors in place of ids."""
    attention_layer: int | None = None
    """The layer whose cross-attention the decoders return; None: they return none."""
    text: bool = False
    """The search takes and returns strings."""
    embedding: TextEmbedding | None = None
    """The vectors that an encoder alone makes of its output besides (`TextEmbedding.arithmetic`); None: nothing."""
    dimensions: int | None = None
    """Numbers of a text's vector, where they are fewer than the checkpoint's."""
    by_token: bool = False
    """The graph of an encoder alone has a row for each token: a fact of the target."""

    @classmethod
    def read(cls, values: Mapping[str, Any], config: TransformerConfig) -> Request:
        """Read what mlx_transformer.json says of a folder's graphs. `ValueError` for a layer that isn't there."""
        layer = values[CROSS_ATTENTION]["layer"] if CROSS_ATTENTION in values else None
        if layer is not None and layer not in range(config.decoder_layers):
            raise ValueError(f"there is no decoder layer {layer!r}")
        vectors = values.get(INPUTS_EMBEDS) is True
        made = values.get(SENTENCE_EMBEDDING)
        embedding = None if made is None else _embedding(**made)
        by_token = values.get(BY_TOKEN) is True
        fields = {"inputs_embeds": vectors, "attention_layer": layer, "embedding": embedding, "by_token": by_token}
        fields |= {"dimensions": values.get(DIMENSIONS)}
        return cls(config=config, **fields)

    def written(self) -> dict[str, Any]:
        """Give what `read` reads: the entries of mlx_transformer.json, only those that differ from the default."""
        attention = {} if self.attention_layer is None else {CROSS_ATTENTION: {"layer": self.attention_layer}}
        facts = {INPUTS_EMBEDS: True} if self.inputs_embeds else {}
        facts |= {BY_TOKEN: True} if self.by_token else {}
        facts |= {DIMENSIONS: self.dimensions} if self.dimensions is not None else {}
        if (e := self.embedding) is None:
            return {**attention, **facts}
        made = {"pooling": [*e.pooling], "dense": [asdict(layer) for layer in e.dense], "normalize": e.normalize}
        made |= {name: getattr(e, name) for name in e.kinds[1:]}
        return {**attention, **facts, SENTENCE_EMBEDDING: made}


def _embedding(pooling: list[Any], dense: list[dict[str, Any]], **more: Any) -> TextEmbedding:
    from mlx_transformer.core.text_embedding import Dense, TextEmbedding  # of few models

    return TextEmbedding(pooling=tuple(pooling), dense=tuple(Dense(**layer) for layer in dense), **more)
