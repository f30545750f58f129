"""What objects show of themselves in Jupyter."""

from __future__ import annotations

import subprocess
import sys

from standalone_page import read
from waiting import PATIENCE

from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.page import table


def test_a_table_escapes_all_text():
    shown = table("<a>", [("<b>", "<c>"), ("d", "&lt;")], head=True)
    assert read(shown) == "<a><b><c>d&lt;"
    assert shown.count("<td") == 1
    assert "color" not in shown, "the page's own colours, dark or light"


def test_a_config_shows_its_sizes_and_what_is_not_default():
    plain = TransformerConfig(vocab_size=50)
    sizes = {"architecture", "vocab_size", "d_model", "encoder_layers", "decoder_layers", "heads", "d_ff"}
    assert plain.summary().keys() == sizes
    changed = TransformerConfig(vocab_size=50, source_vocab_size=60, tie_embeddings="none", d_k=32, gated=True)
    more = {"source_vocab_size": "60", "tie_embeddings": "none", "d_k": "32", "gated": "True"}
    assert changed.summary() == {**plain.summary(), **more}
    assert "gated" in read(changed._repr_html_())


def test_it_needs_no_mlx():
    code = (
        "import sys\nfrom mlx_transformer import TransformerConfig\n"
        "print(TransformerConfig(vocab_size=9)._repr_html_())\n"
        "assert not {'mlx', 'onnx', 'onnxruntime'} & sys.modules.keys()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert "TransformerConfig" in read(done.stdout)
