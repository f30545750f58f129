"""Configs drawn at random, for hypothesis: any that makes sense."""

from hypothesis import strategies as st
from options import drawn, options

from mlx_transformer.core.config import TransformerConfig

SMALL = dict(vocab_size=23, d_model=16, heads=4, d_ff=24, encoder_layers=1, decoder_layers=2, max_positions=32)


@st.composite
def configs(draw) -> TransformerConfig:
    """Any config that makes sense."""
    values = {**SMALL, **draw(options()), "source_vocab_size": 19}
    values["key_value_heads"] = draw(st.sampled_from([1, 2, 4]))
    if draw(st.booleans()):
        values["d_k"], values["d_v"] = draw(st.sampled_from([2, 6])), draw(st.sampled_from([3, 8]))
    values["dropout"] = draw(st.sampled_from([0.0, 0.2]))
    values["attention_dropout"] = draw(st.sampled_from([0.0, 0.2]))
    values["activation_dropout"] = draw(st.sampled_from([0.0, 0.2]))
    return drawn(values)
