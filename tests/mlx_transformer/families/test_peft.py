"""Adapters that PEFT saved, and what it computed with them (`make_golden_peft.py`): imported or merged they compute the
same, and ours written for PEFT are read back as they were."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from adapter_models import made
from combined import combined
from quantized_models import wide
from random_models import random_weights

import mlx_transformer as mt
from export.validate.reference import Reference
from export.validate.rule import Deviation, ErrorScale, Measurement, Truth, budget_for
from mlx_transformer.cli import main
from mlx_transformer.commands.converting import merge
from mlx_transformer.convert import import_huggingface, to_huggingface, to_peft
from mlx_transformer.convert.merge import merge_adapter
from mlx_transformer.convert.quantize import quantize_checkpoint
from mlx_transformer.core.adapter import linear_maps
from mlx_transformer.core.checkpoint import open_checkpoint, save_checkpoint
from mlx_transformer.core.quantization import Scheme
from mlx_transformer.system.errors import UserError

HERE = Path(__file__).parent
GOLDEN = HERE / "golden_peft"
NOTES = {
    "lora": "LoRA of rank 2 of 11 matrices",
    "rslora": "rsLoRA of rank 2 of",
    "dora": "DoRA of rank 2, 3 of",
    "classes": "LoRA of rank 2 of 4 matrices, and 2 tensors of its own (classifier.bias, classifier.weight)",
    "embedding": "LoRA of rank 2 of 3 matrices",
    "transposed": "DoRA of rank 2 of 4 matrices",
    "untied": "LoRA of rank 2 of 4 matrices",
    "tables": "nothing of shared.weight, which PEFT's model doesn't read",
    "rows": "LoRA of rank 2 of",
    "resized": "LoRA of rank 2 of",
}


@pytest.mark.parametrize("name", NOTES)
def test_an_imported_adapter_computes_what_peft_computes(name: str, tmp_path: Path) -> None:
    [note] = [note for note in import_huggingface(GOLDEN / name, tmp_path / "model") if "merged into" in note]
    assert NOTES[name] in note
    opened, given = open_checkpoint(tmp_path / "model"), dict(np.load(GOLDEN / name / "answers.npz"))
    weights, mask = dict(opened.tensors()), given["mask"].astype(bool)
    others = {"token_types": np.zeros_like(given["ids"])} if opened.config.token_types else {}
    truths = []
    for kind in (np.float64, np.float32):
        reference = Reference(opened.config, weights, kind)
        if "target" in given:
            truths.append(reference(given["ids"], given["target"], mask))
        elif name == "embedding":  # of a bare encoder
            truths.append(reference.encode(given["ids"], mask, **others))
        else:
            truths.append(reference(given["ids"], mask=mask, **others))
    valid = np.ones(given["target"].shape if "target" in given else len(mask), bool)
    valid = mask if given["logits"].shape[:2] == mask.shape and "target" not in given else valid
    truth = Truth.of(*truths, valid)
    pool, budget = ErrorScale.pooled([truth.scale]), budget_for("float32", "cpu")
    measured = Measurement.of(Deviation.of(given["logits"], truth), truth.scale, pool, budget)
    assert measured.passed, measured


def test_labels_are_those_of_transformers_and_load_takes_the_folder(tmp_path: Path) -> None:
    model, _ = mt.load(GOLDEN / "classes")
    assert model.config.head.labels == ("LABEL_0", "LABEL_1", "LABEL_2")


@pytest.mark.parametrize(("name", "base"), [("dora", "golden_5/bart"), ("classes", "golden_encoders/bert")])
def test_merged_into_a_checkpoint_of_the_base_it_is_what_import_makes(name: str, base: str, tmp_path: Path) -> None:
    import_huggingface(GOLDEN / name, tmp_path / "expected")
    import_huggingface(HERE / base, tmp_path / "base")
    expected = dict(open_checkpoint(tmp_path / "expected").tensors())
    for i, given in enumerate(([str(tmp_path / "base")], [str(HERE / base)], [])):  # ours, the published one, its name
        main(["merge", *given, str(GOLDEN / name), "--out", str(out := tmp_path / f"out-{i}")])
        merged = dict(open_checkpoint(out).tensors())
        assert merged.keys() == expected.keys()
        assert all(np.array_equal(merged[key], expected[key]) for key in merged)


def test_merged_into_integers_only_what_it_changes_is_rounded_again(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "wide", wide(), random_weights(wide(), 3))
    quantize_checkpoint(tmp_path / "wide", tmp_path / "integers", Scheme(128, 4))
    to_huggingface(tmp_path / "wide", tmp_path / "published")
    target = "encoder.layers.0.self_attention.query_proj"
    made(tmp_path / "wide", targets=[target]).write(tmp_path / "adapter")
    to_peft(tmp_path / "wide", tmp_path / "adapter", tmp_path / "peft", str(tmp_path / "published"))
    merge_adapter(tmp_path / "integers", tmp_path / "peft", tmp_path / "out", requantize=True)
    before, after = open_checkpoint(tmp_path / "integers"), open_checkpoint(tmp_path / "out")
    assert after.quantization == before.quantization
    stored = dict(before.stored())
    changed = {name for name, array in after.stored() if not np.array_equal(array, stored[name])}
    assert f"{target}.weight" in changed
    assert changed <= set(Scheme(128, 4).tensors(f"{target}.weight"))


BASES = ["golden/umt5", "golden_encoders/modernbert-tokens", "golden_encoders/distilbert", "golden_decoders/gpt2"]


@pytest.mark.parametrize(("base", "kind"), combined(BASES, ["lora", "rslora", "dora"]))
def test_an_adapter_written_for_peft_changes_the_base_as_ours_does(base: str, kind: str, tmp_path: Path) -> None:
    import_huggingface(HERE / base, tmp_path / "base")
    maps = linear_maps(open_checkpoint(tmp_path / "base").config)
    targets = [path for path in maps if not path.endswith(("key_proj", "gate_proj"))]  # parts of joint matrices
    made(tmp_path / "base", "dora" if kind == "dora" else "lora", targets, rank=2).write(tmp_path / "adapter")
    stable = ["--rslora"] if kind == "rslora" else []
    main(["to-peft", *(str(tmp_path / name) for name in ("base", "adapter", "peft")), *stable])
    config = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert (config["use_rslora"], config["use_dora"]) == (kind == "rslora", kind == "dora")
    for adapter, out in (("adapter", "ours"), ("peft", "theirs")):
        merge_adapter(tmp_path / "base", tmp_path / adapter, tmp_path / out)
    ours, theirs, before = (dict(open_checkpoint(tmp_path / name).tensors()) for name in ("ours", "theirs", "base"))
    for name, array in theirs.items():
        np.testing.assert_allclose(array, ours[name], rtol=2**-22, atol=1e-9)
        assert np.array_equal(array, before[name]) == (name.removesuffix(".weight") not in targets) or kind == "dora"


def test_an_adapter_for_peft_of_a_model_trained_here(tmp_path: Path) -> None:
    """transformers has all sines before the cosines: the adapter's channels change places with the model's."""
    save_checkpoint(tmp_path / "own", wide(), random_weights(wide(), 3))
    made(tmp_path / "own", "dora").write(tmp_path / "adapter")
    to_huggingface(tmp_path / "own", tmp_path / "published")
    to_peft(tmp_path / "own", tmp_path / "adapter", tmp_path / "peft", str(tmp_path / "published"))
    for given, out in (("adapter", "ours"), ("peft", "theirs")):
        merge_adapter(tmp_path / "own", tmp_path / given, tmp_path / out)
    ours, theirs = (dict(open_checkpoint(tmp_path / name).tensors()) for name in ("ours", "theirs"))
    for name, array in theirs.items():
        np.testing.assert_allclose(array, ours[name], rtol=2**-22, atol=1e-9)


def test_an_adapter_for_peft_needs_its_base(tmp_path: Path) -> None:
    import_huggingface(HERE / "golden/t5", tmp_path / "base")
    made(tmp_path / "base", rank=2).write(tmp_path / "adapter")
    with pytest.raises(UserError, match="BART has no such model"):
        to_peft(tmp_path / "base", tmp_path / "adapter", tmp_path / "out", str(HERE / "golden/bart"))
    with pytest.raises(UserError, match=r"a\.gguf: has no config.json, .*/base OUT --mlx-lm writes it"):
        to_peft(tmp_path / "base", tmp_path / "adapter", tmp_path / "out", str(tmp_path / "a.gguf"), mlx_lm=True)
    save_checkpoint(tmp_path / "own", wide(), random_weights(wide(), 3))
    made(tmp_path / "own").write(tmp_path / "of-own")
    with pytest.raises(UserError, match="wasn't imported; --base NAME"):
        to_peft(tmp_path / "own", tmp_path / "of-own", tmp_path / "out")
    with pytest.raises(UserError, match="give BASE and ADAPTER"):
        merge(tmp_path / "adapter", out=tmp_path / "out")


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """golden_peft/lora, with its base beside it."""
    for part in ("golden/t5", "golden_peft/lora"):
        shutil.copytree(HERE / part, tmp_path / part)
    return tmp_path / "golden_peft" / "lora"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type 'IA3'; supported: LORA"),
        ({"peft_type": None}, "peft_type None"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights 'pissa_niter_4' changed the base, too"),
        ({"alora_invocation_tokens": [4]}, "alora_invocation_tokens=.* is not supported"),
        ({"lora_alpha": "x"}, "lora_alpha must be a number"),
        ({"alpha_pattern": {"(": 1}}, "a key is no regular expression"),
        ({"modules_to_save": "x"}, "modules_to_save='x' is no list of names"),
        ({"alpha_pattern": [1]}, "alpha_pattern an object of numbers"),
        ({"base_model_name_or_path": None}, "base_model_name_or_path names no base"),
        ({"base_model_name_or_path": "../../golden/none"}, "golden/none: no such folder"),
    ],
)
def test_settings_that_cannot_be_read(changes: dict, message: str, copied: Path) -> None:
    file = copied / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(UserError, match=message):
        import_huggingface(copied, copied.parent / "model")


def test_an_adapter_of_another_base_is_refused(copied: Path) -> None:
    file = copied / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": str(HERE / "golden/marian")}))
    with pytest.raises(UserError, match=r"doesn't fit its base .*: .*the base has no decoder\.block\.0"):
        import_huggingface(copied, copied.parent / "model")
