"""Published folders whose matrices mlx-lm has quantised: the integers stay as they are, whatever the family's names,
ties and joint matrices; everything computes what the same folder in float32 computes."""

from __future__ import annotations

import dataclasses
import itertools
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from small_models import random_weights

from mlx_transformer import Transformer
from mlx_transformer.convert import import_huggingface, to_huggingface
from mlx_transformer.core.checkpoint import open_checkpoint, save_checkpoint
from mlx_transformer.core.parameters import quantizable_shapes
from mlx_transformer.core.quantization import Scheme
from mlx_transformer.nn.quantize import quantized
from mlx_transformer.system.errors import UserError

HERE = Path(__file__).parent
SCHEMES = [Scheme(32, 4), Scheme(32, 3), Scheme(32, 4, "mxfp4"), Scheme(16, 4, "nvfp4"), Scheme(32, 8, "mxfp8")]
FOLDERS = {"bart": "golden/bart", "modernbert": "golden_encoders/modernbert"}


def quantised_folder(source: Path, out: Path, **entry) -> Path:
    """A folder like `source`, but 64 wide, its matrices quantised in turn by `SCHEMES`; in `out`-plain the same values
    as floats."""
    import_huggingface(source, out.with_name("small"))
    config = dataclasses.replace(
        open_checkpoint(out.with_name("small")).config, d_model=64, d_k=None, d_v=None, d_ff=96
    )
    save_checkpoint(out.with_name("wide"), config, random_weights(config))
    source = to_huggingface(out.with_name("wide"), out.with_name("published"))
    tensors, stored, plain = load_file(source / "model.safetensors"), {}, {}
    joint = ("Wqkv", "Wi.")  # rows of several matrices of ours
    schemes = itertools.cycle(SCHEMES)
    for name, array in sorted(tensors.items()):
        fits = array.ndim == 2 and array.shape[1] % 32 == 0 and name.endswith(".weight") and "norm" not in name
        if not fits:
            stored[name] = plain[name] = array
            continue
        packed = quantized(array.astype(np.float32), Scheme(32, 6) if any(j in name for j in joint) else next(schemes))
        stored |= packed.tensors(name)
        plain[name] = packed.dequantised()
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    for folder, arrays, more in ((out, stored, entry), (out.with_name(f"{out.name}-plain"), plain, {})):
        shutil.copytree(source, folder)
        save_file(arrays, folder / "model.safetensors", metadata={"format": "mlx"})
        (folder / "config.json").write_text(json.dumps(config | more), encoding="utf-8")
    return out


ENTRY = {"group_size": 32, "bits": 4, "mode": "affine"}


@pytest.mark.parametrize("name", FOLDERS)
def test_integers_stay(name, tmp_path):
    folder = quantised_folder(HERE / FOLDERS[name], tmp_path / "q", quantization=ENTRY, quantization_config=ENTRY)
    [note] = [n for n in import_huggingface(folder, tmp_path / "model") if "bits in groups of 32" in n]
    assert "4 bits (nvfp4) in groups of 16" in note
    import_huggingface(tmp_path / "q-plain", tmp_path / "plain")
    opened, plain = open_checkpoint(tmp_path / "model"), open_checkpoint(tmp_path / "plain")
    assert opened.config == plain.config
    assert set(opened.quantization.values()) >= set(SCHEMES)
    assert opened.quantization.keys() >= {n for n, s in quantizable_shapes(opened.config).items() if s[1] % 32 == 0}
    expected = dict(plain.tensors())
    for parameter, array in opened.tensors():
        np.testing.assert_array_equal(array, expected[parameter], err_msg=parameter)
    ids = [np.array([[5, 6, 7, 2]]), np.array([[1, 8, 9]])][: 1 + opened.config.has_decoder]
    logits = [np.array(Transformer.load(each)(*ids)) for each in (tmp_path / "model", folder, tmp_path / "plain")]
    np.testing.assert_array_equal(logits[0], logits[1])
    np.testing.assert_allclose(logits[0], logits[2], atol=1e-4 * np.abs(logits[2]).max())


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128}}, "quantised by gptq: import"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "quantised by awq"),
        ({"quantization": {**ENTRY, "bits": 7}}, "config.json: quantization: bits=7"),
        ({"quantization": {**ENTRY, "model.shared": {"group_size": 32, "bits": 8}}}, "model.shared.weight is"),
        ({"quantization": ENTRY, "quantize_activations": True}, "activations are rounded too"),
        ({}, "model.shared.weight has type uint32"),
    ],
)
def test_what_is_no_folder_of_mlx_lm(entry, said, tmp_path):
    folder = quantised_folder(HERE / FOLDERS["bart"], tmp_path / "q", **entry)
    with pytest.raises(UserError, match=said) as raised:
        import_huggingface(folder, tmp_path / "model")
    assert "\n" not in str(raised.value)
