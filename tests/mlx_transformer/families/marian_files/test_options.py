"""What a model's options mean, and which of them are refused by name."""

from __future__ import annotations

import re
from typing import Any

import pytest
from marian_models import KINDS, SIZES, STUDENT, yaml

from mlx_transformer.families.marian_files.network import config_of
from mlx_transformer.families.marian_files.options import parse_options, read_options, write_options
from mlx_transformer.system.errors import UserError

PUBLISHED = """\
bert-train-type-embeddings: true
dec-cell: ssru
dec-depth: 2
dim-emb: 256
dim-vocabs:
  - 32000
  - 32000
enc-depth: 6
enc-type: bidirectional
input-types: []
layer-normalization: false
tied-embeddings-all: true
transformer-aan-activation: swish
transformer-decoder-autoreg: rnn
transformer-dim-ffn: 1536
transformer-ffn-activation: relu
transformer-guided-alignment-layer: last
transformer-heads: 8
transformer-postprocess: dan
transformer-postprocess-emb: d
transformer-postprocess-top: ""
transformer-preprocess: ""
transformer-tied-layers: []
type: transformer
version: v1.9.56 94aeaa46 2021-04-28 00:28:35 +0100
"""


def test_a_published_student():
    fields, sizes, problems = read_options(parse_options(PUBLISHED, "here"))
    assert problems == []
    assert sizes == (32000, 32000)
    config = config_of(fields, sizes)
    assert (config.d_model, config.heads, config.d_ff, config.encoder_layers, config.decoder_layers) == (
        256,
        8,
        1536,
        6,
        2,
    )
    assert (config.activation, config.norm_placement, config.norm_epsilon) == ("relu", "post", 1e-6)
    assert (config.decoder_self_attention, config.tie_embeddings, config.positions) == (
        "ssru",
        "all",
        "sinusoidal_concat",
    )
    assert (config.vocab_size, config.pad_id, config.bos_id, config.eos_id) == (32001, 32000, 32000, 0)


def test_defaults_are_marians():
    given = {key: value for key, value in SIZES.items() if key != "tied-embeddings-all"}
    fields, _, problems = read_options({"type": "transformer", **given})
    assert problems == []
    assert (fields["activation"], fields["decoder_self_attention"], fields["tie_embeddings"]) == (
        "silu",
        "attention",
        "none",
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"type": "s2s"}, "type is s2s, not transformer"),
        ({"transformer-ffn-activation": "gelu"}, "transformer-ffn-activation gelu is no network"),
        ({"transformer-decoder-autoreg": "average-attention"}, "transformer-decoder-autoreg average-attention is no"),
        ({"dec-cell": "gru"}, "dec-cell is gru, not ssru"),
        ({"transformer-ffn-depth": 3}, "transformer-ffn-depth is 3, not 2"),
        ({"transformer-preprocess": "n"}, "transformer-preprocess n and transformer-postprocess dan and"),
        ({"transformer-postprocess": "dhn"}, "transformer-postprocess dhn"),
        ({"transformer-postprocess-emb": "dn"}, "transformer-postprocess-emb is dn, not d"),
        ({"transformer-train-positions": True}, "transformer-train-positions is true, which means another network"),
        ({"transformer-tied-layers": [1, 1]}, r"transformer-tied-layers is \[1, 1\], which means"),
        ({"lemma-dim-emb": 256}, "lemma-dim-emb is 256, which means another network"),
        ({"right-left": True}, "right-left is true"),
        ({"enc-depth": 0}, "enc-depth is 0, not a number"),
        ({"dim-emb": "x"}, "dim-emb is x, not a number"),
        ({"dim-vocabs": [5]}, r"dim-vocabs is \[5\], not two numbers"),
        ({"context-enc2-depth": 2}, "unknown key 'context-enc2-depth'"),
    ],
)
def test_another_network_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    _, _, problems = read_options(parse_options(yaml({**STUDENT, **changes}), "here"))
    assert re.search(message, "; ".join(problems))


def test_yaml_is_flat():
    text = "---\n# a note\na: 1\n\nb: 1.5\nc: 'x y'\nd: [1, two]\ne:\n  - true\n  - 3\nf: v 1 1\n"
    expected = {"a": 1, "b": 1.5, "c": "x y", "d": [1, "two"], "e": [True, 3], "f": "v 1 1"}
    assert parse_options(text, "here") == expected


@pytest.mark.parametrize("line", ["  deeper: 1", "a line", "- 1", "key: 1\nkey: 2", "a:b", "&x: *y"])
def test_yaml_of_another_kind_names_its_line(line: str) -> None:
    text = f"type: transformer\n{line}\nend: 1 1"
    with pytest.raises(UserError, match=r"here: line [23] of its options is none that is understood: '"):
        parse_options(text, "here")


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_is_read_back(kind: str) -> None:
    fields, sizes, problems = read_options(parse_options(yaml(KINDS[kind]), "here"))
    assert problems == []
    written = write_options(config_of(fields, sizes), sizes, "x")
    assert read_options(parse_options(written, "here")) == (fields, sizes, [])
