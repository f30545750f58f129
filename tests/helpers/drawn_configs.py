"""Configs drawn at random, for hypothesis: any that makes sense."""

from hypothesis import strategies as st

from mlx_transformer.spec.config import CHOICES, TransformerConfig

SMALL = dict(vocab_size=23, d_model=16, heads=4, d_ff=24, encoder_layers=1, decoder_layers=2, max_positions=32)


@st.composite
def configs(draw) -> TransformerConfig:
    """Any config that makes sense."""
    choice = {name: draw(st.sampled_from(allowed)) for name, allowed in CHOICES.items()}
    flags = "gated attention_bias feed_forward_bias output_bias scale_embeddings".split()
    values = {**SMALL, **choice, **{name: draw(st.booleans()) for name in flags}}
    values["key_value_heads"] = draw(st.sampled_from([1, 2, 4]))
    if draw(st.booleans()):
        values["d_k"], values["d_v"] = draw(st.sampled_from([2, 6])), draw(st.sampled_from([3, 8]))
    values["dropout"] = draw(st.sampled_from([0.0, 0.2]))
    values["attention_dropout"] = draw(st.sampled_from([0.0, 0.2]))
    values["activation_dropout"] = draw(st.sampled_from([0.0, 0.2]))
    if values["architecture"] == "encoder":
        values["decoder_layers"] = 0
        values["tie_embeddings"] = draw(st.sampled_from(["none", "all"]))
    elif values["architecture"] == "decoder":
        values["encoder_layers"] = 0
        values["tie_embeddings"] = draw(st.sampled_from(["none", "target-output"]))
    elif values["tie_embeddings"] != "all":
        values["source_vocab_size"] = 19
    return TransformerConfig(**values)
