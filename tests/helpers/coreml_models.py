"""Models of every architecture, and the shapes of their graphs, for target coreml."""

from small_models import alone, encoder_decoder

from mlx_transformer.core.config import TransformerConfig

ARCHITECTURES = ("encoder-decoder", "encoder", "decoder")

SHAPE = {"encoder-decoder": "3x12x16", "encoder": "3x12", "decoder": "3x16"}


def config_of(name: str, architecture: str) -> TransformerConfig:
    return encoder_decoder(name) if architecture == "encoder-decoder" else alone(name, architecture)
