"""`export --inputs-embeds`: the command writes such a folder, and the others say what it is."""

import numpy as np
import pytest
from command_line import both_models, caller

from export import OnnxTransformer
from mlx_transformer import load

made = pytest.fixture(scope="module")(both_models)
call = pytest.fixture(caller)


def test_export_of_an_encoder_that_reads_vectors(call, made, tmp_path):
    status, out, said = call("export", made / "model", tmp_path / "out", "--inputs-embeds")
    assert (status, said) == (0, "")
    assert "inputs_embeds" in call("info", tmp_path / "out")[1]
    vectors = np.random.default_rng(0).standard_normal((3, 16))
    onnx, mlx = OnnxTransformer(tmp_path / "out"), load(made / "model")[0]
    assert onnx.generate(inputs_embeds=[vectors]) == mlx.generate(inputs_embeds=[vectors])
    assert call("validate", made / "model", tmp_path / "out", "--seed", "3")[0] == 0
    status, out, said = call("translate", tmp_path / "out", "one")
    assert (status, out) == (2, "")
    assert said.endswith("out: its encoder reads vectors, inputs_embeds: it translates no text\n")
    status, out, said = call("export", made / "model", tmp_path / "one.onnx", "--search", "--inputs-embeds")
    assert (status, out) == (2, "")
    assert "one file that reads ids: leave out --inputs-embeds" in said
