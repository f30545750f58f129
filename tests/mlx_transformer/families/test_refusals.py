"""What `import` and `to-huggingface` refuse: one line each, with the folder and every reason."""

from __future__ import annotations

import dataclasses
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from marian_folders import PAPER, edit_config, edit_tensors, written
from small_models import encoder_decoder, random_weights

from export import export_onnx
from mlx_transformer.convert import import_huggingface, to_huggingface
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.positions import sinusoids
from mlx_transformer.families import engine
from mlx_transformer.families.bart import M2M100
from mlx_transformer.families.engine import config_of, differences
from mlx_transformer.families.marian import MARIAN
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.files import read_object

# What config.json may say, and the reason that must be given.
REFUSED = {
    "model_type is 'led'": dict(model_type="led"),
    "model_type is ['marian']": dict(model_type=["marian"]),
    "activation_function=['relu'] is not one of": dict(activation_function=["relu"]),
    "normalize_before is on": dict(normalize_before=True),
    "normalize_embedding is on; add_final_layer_norm is on": dict(normalize_embedding=True, add_final_layer_norm=True),
    "d_model=32 is not a multiple of decoder_attention_heads=3": dict(decoder_attention_heads=3),
    "model.decoder.layers.0.fc1.weight is (48, 32), expected (50, 32)": dict(decoder_ffn_dim=50),
    "d_model=32 is not a multiple of encoder_attention_heads=5": dict(
        encoder_attention_heads=5, decoder_attention_heads=5
    ),
    "activation_function='tanh' is not one of relu, gelu": dict(activation_function="tanh"),
    "is_encoder_decoder is off": dict(is_encoder_decoder=False),
    "its weights are quantised": dict(quantization_config={"bits": 8}),
    "d_model='a lot' must be a whole number": dict(d_model="a lot"),
    "pad_id=77 is outside the vocabulary of 50": dict(pad_token_id=77),
    "eos_token_id='x' must be a whole number": dict(eos_token_id=["x", 3]),
    "missing model.encoder.layers.2.self_attn.q_proj.weight (32, 32)": dict(encoder_layers=3),
    "unknown model.decoder.layers.1.encoder_attn.v_proj.weight (32, 32)": dict(decoder_layers=1),
    "model.shared.weight is (50, 32), expected (51, 32)": dict(vocab_size=51, decoder_vocab_size=51),
    "decoder_vocab_size=2 is not vocab_size=50, but both share": dict(decoder_vocab_size=2),
    "decoder_vocab_size=[1] must be a whole number": dict(decoder_vocab_size=[1]),
    "tie_word_embeddings=1.5 must be true or false": dict(tie_word_embeddings=1.5),
    "bos_token_id='../x' must be a whole number": dict(bos_token_id="../x"),
    "use_cache='no' must be true or false": dict(use_cache="no"),
    "missing lm_head.weight (50, 32)": dict(tie_word_embeddings=False),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_refused_configs(reason: str, tmp_path: Path) -> None:
    folder = written(tmp_path)
    edit_config(folder, **REFUSED[reason])
    with pytest.raises(UserError) as error:
        import_huggingface(folder, tmp_path / "back")
    assert reason in str(error.value) or reason in error.value.problems
    assert str(folder) in str(error.value)
    assert not (tmp_path / "back").exists()


def test_what_is_not_read_and_may_matter_is_told(tmp_path: Path) -> None:
    shutil.copytree(Path(__file__).parent / "golden_encoders" / "bert", tmp_path / "theirs")
    file = tmp_path / "theirs" / "config.json"
    values = json.loads(file.read_text())
    idle = {"use_cache": True, "classifier_dropout": 0.3, "pruned_heads": {}, "rescale": False, "num_beams": 4}
    file.write_text(json.dumps({**values, **idle}))
    assert not [note for note in import_huggingface(tmp_path / "theirs", tmp_path / "out") if "aren't read" in note]
    file.write_text(json.dumps({**values, **idle, "alibi": True, "embedding_size": 64}))
    [note] = [note for note in import_huggingface(tmp_path / "theirs", tmp_path / "new") if "aren't read" in note]
    assert note.endswith(": alibi=True, embedding_size=64")


def test_a_model_of_ours_is_no_published_one(tmp_path: Path) -> None:
    folder = written(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "ours").rename(tmp_path / "run" / "model")
    export_onnx(tmp_path / "run" / "model", tmp_path / "onnx")
    for name, kind in (("run", "a run"), ("run/model", "a checkpoint"), ("onnx", "an ONNX model")):
        with pytest.raises(UserError, match=f"{name}: is {kind} already, which other commands take as it is"):
            import_huggingface(tmp_path / name, tmp_path / "back")
    values = read_object(folder / "config.json")
    (folder / "config.json").write_text(json.dumps({k: x for k, x in values.items() if k != "model_type"}))
    with pytest.raises(UserError, match="theirs: names no model_type; these can be imported: bart"):
        import_huggingface(folder, tmp_path / "back")


# The same of a Pegasus: what published ones say of themselves is what it is, and nothing else.
REFUSED_OF_PEGASUS = {
    "normalize_before is off": dict(normalize_before=False),
    "normalize_embedding is on": dict(normalize_embedding=True),
    "add_final_layer_norm is off": dict(add_final_layer_norm=False),
    "static_position_embeddings is off": dict(static_position_embeddings=False),
    "add_bias_logits=0.5 must be true or false": dict(add_bias_logits=0.5),
    "missing lm_head.weight (50, 32)": dict(tie_word_embeddings=False),
    "normalize_before is on": dict(model_type="marian"),
    "unknown model.encoder.layer_norm.weight (32,)": dict(
        model_type="marian", normalize_before=False, add_final_layer_norm=False
    ),
}


@pytest.mark.parametrize("reason", REFUSED_OF_PEGASUS)
def test_refused_configs_of_pegasus(reason: str, tmp_path: Path) -> None:
    folder = written(tmp_path, dataclasses.replace(PAPER, norm_placement="pre"))
    edit_config(folder, **REFUSED_OF_PEGASUS[reason])
    with pytest.raises(UserError) as error:
        import_huggingface(folder, tmp_path / "back")
    assert reason in str(error.value)


def test_a_family_that_was_asked_for_says_what_it_lacks(tmp_path: Path) -> None:
    written(tmp_path)
    with pytest.raises(UserError, match="Pegasus has no such model: norm_placement='post', Pegasus has 'pre'"):
        to_huggingface(tmp_path / "ours", tmp_path / "pegasus", family="pegasus")


def test_padding_has_no_position_in_m2m100(tmp_path: Path) -> None:
    """So a decoder that begins with it would count from the token after."""
    golden = Path(__file__).parent / "golden" / "m2m100"
    folder = shutil.copytree(golden, tmp_path / "theirs")
    edit_config(folder, decoder_start_token_id=1)
    with pytest.raises(UserError, match="decoder_start_token_id=1 is pad_token_id, which has no position"):
        import_huggingface(folder, tmp_path / "ours")
    config = config_of(M2M100, read_object(golden / "config.json"), {}, golden)
    assert differences(M2M100, config) == []
    reasons = differences(M2M100, dataclasses.replace(config, bos_id=config.pad_id))
    assert any("which has no position" in reason for reason in reasons), reasons


DAMAGED_TENSORS = {
    "missing model.decoder.layers.0.fc2.bias (32,)": lambda t: t.pop("model.decoder.layers.0.fc2.bias") is None,
    "unknown model.encoder.layernorm_embedding.weight (32,)": lambda t: {
        **t,
        "model.encoder.layernorm_embedding.weight": np.ones(32, np.float32),
    },
    "model.encoder.embed_tokens.weight differs from model.shared.weight": lambda t: {
        **t,
        "model.encoder.embed_tokens.weight": t["model.shared.weight"] + 1,
    },
    "model.encoder.embed_positions.weight differs from Marian's sinusoids": lambda t: {
        **t,
        "model.encoder.embed_positions.weight": sinusoids(40, 32),
    },
    "final_logits_bias is (2, 50), expected (50,)": lambda t: {**t, "final_logits_bias": np.zeros((2, 50), np.float32)},
    "model.shared.weight has type int32, not floating point": lambda t: {
        **t,
        "model.shared.weight": t["model.shared.weight"].astype(np.int32),
    },
}


@pytest.mark.parametrize("reason", DAMAGED_TENSORS)
def test_refused_weights(reason: str, tmp_path: Path) -> None:
    folder = written(tmp_path)
    edit_tensors(folder, DAMAGED_TENSORS[reason])
    with pytest.raises(UserError) as error:
        import_huggingface(folder, tmp_path / "back")
    assert reason in str(error.value)


def rename(before: str, *after: str):
    def change(folder: Path) -> None:
        (folder / before).rename(folder / after[0]) if after else (folder / before).unlink()

    return change


def cut(name: str, size: int):
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:size])


DAMAGED_FILES = {
    "pytorch_model.bin: no file of torch.save": rename("model.safetensors", "pytorch_model.bin"),
    "its weights may be in model-00001-of-00002.safetensors; save it by": rename(
        "model.safetensors", "model-00001-of-00002.safetensors"
    ),
    "none of model.safetensors, model.safetensors.index.json, pytorch_model.bin": rename("model.safetensors"),
    "config.json missing": rename("config.json"),
    "damaged, or not JSON": cut("config.json", 40),
    "model.safetensors: ends after 4,000 of at least": cut("model.safetensors", 4000),
    "expected a JSON object, found list": lambda folder: (folder / "generation_config.json").write_text("[1]"),
    "no such folder": lambda folder: folder.rename(folder.parent / "elsewhere"),
}


@pytest.mark.parametrize("reason", DAMAGED_FILES)
def test_damaged_folders(reason: str, tmp_path: Path) -> None:
    folder = written(tmp_path)
    DAMAGED_FILES[reason](folder)
    with pytest.raises(UserError) as error:
        import_huggingface(folder, tmp_path / "back")
    assert reason in str(error.value)
    assert str(folder) in str(error.value)


def test_a_folder_of_theirs_is_not_replaced(tmp_path: Path) -> None:
    folder = written(tmp_path)
    shutil.copytree(folder, tmp_path / "copy")
    for force in (False, True):
        with pytest.raises(UserError, match="is the folder that is read"):
            import_huggingface(folder, folder, force=force)
        with pytest.raises(UserError, match="holds files that are no checkpoint"):
            import_huggingface(folder, tmp_path / "copy", force=force)
    with pytest.raises(UserError, match="holds another Hugging Face folder; choose another folder, or --force"):
        to_huggingface(tmp_path / "ours", folder)


INEXPRESSIBLE = {
    "modern": [
        "key_value_heads=2, Pegasus has 4",
        "norm='rmsnorm', Pegasus has 'layernorm'",
        "gated=True, Pegasus has False",
        "positions='rotary', Pegasus has 'sinusoidal_halves'",
    ],
    "odd widths": [
        "key_value_heads=1, Marian has 4",
        "d_k=6, Marian has 8",
        "d_v=10, Marian has 8",
        "positions='learned'",
        "embedding_scale=3.25, Marian has None",
    ],
    "two vocabularies": [
        "norm_placement='after', Marian has 'post'",
        "residual_scale=0.4, Marian has None",
        "positions='sinusoidal_concat'",
    ],
    "untied": [
        "residual_scale=1.5, Pegasus has None",
        "query_key_norm=True, Pegasus has False",
        "query_key_norm_place='width', Pegasus has 'before'",
        "attention_scale=0.5, Pegasus has None",
        "logit_scale=0.5, Pegasus has None",
        "logit_cap=2.0, Pegasus has None",
        "positions='none', Pegasus has 'sinusoidal_halves'",
        "decoder={'heads': 2, 'key_value_heads': 1, 'd_k': 8, 'd_v': 5, 'd_ff': 40}, "
        "Pegasus has {'heads': 2, 'd_ff': 40}",
    ],
}


@pytest.mark.parametrize("name", INEXPRESSIBLE)
def test_all_reasons_against_writing_a_model(name: str, tmp_path: Path) -> None:
    config = encoder_decoder(name)
    with pytest.raises(UserError) as error:
        written(tmp_path, config)
    message = str(error.value)
    family = "Pegasus" if name in ("modern", "untied") else "Marian"  # which differs least
    assert f"{family} has no such model: " in message
    assert all(reason in message for reason in INEXPRESSIBLE[name])
    assert message.count(";") == len(INEXPRESSIBLE[name]) - 1
    assert not (tmp_path / "theirs").exists()


def test_other_architectures_and_epsilons_are_refused(tmp_path: Path) -> None:
    single = TransformerConfig(vocab_size=50, d_model=32, heads=4, d_ff=48, architecture="decoder", encoder_layers=0,
                               decoder_layers=1, tie_embeddings="none")  # fmt: skip
    with pytest.raises(UserError, match=r"ours: GPT-2 has no such model: "):
        written(tmp_path / "a", single)
    with pytest.raises(UserError, match=r"norm_epsilon=1e-06, Marian has 1e-05$"):
        written(tmp_path / "b", dataclasses.replace(PAPER, norm_epsilon=1e-6))
    with pytest.raises(UserError, match=r"no such model: d_model=32 is not a multiple of encoder_attention_heads=5$"):
        written(tmp_path / "c", dataclasses.replace(PAPER, heads=5, key_value_heads=5))


@dataclass(frozen=True, kw_only=True)
class More(TransformerConfig):
    """What tomorrow's config may hold."""

    head_norm: bool = False
    reach: int | None = None
    activation: Literal["relu", "gelu", "gelu_tanh", "silu", "cubed"] = "relu"  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (dict(head_norm=True), "head_norm=True, Marian has False"),
        (dict(reach=4), "reach=4, Marian has None"),
        (dict(activation="cubed"), "activation_function='cubed' is not one of relu"),
        ({}, ""),
    ],
)
def test_options_to_come_are_refused_by_themselves(changes, reason, monkeypatch) -> None:
    """By the reader, which says nothing of them: nowhere is a list of what Marian lacks."""
    monkeypatch.setattr(engine, "TransformerConfig", More)
    config = More(**{**PAPER.to_dict(), **changes})
    weights = random_weights(config)
    if not reason:
        assert engine.exported(MARIAN, config, weights.items(), Path("ours"))[0]["activation_function"] == "relu"
        return
    with pytest.raises(UserError) as error:
        engine.exported(MARIAN, config, weights.items(), Path("ours"))
    assert str(error.value).startswith(f"ours: Marian has no such model: {reason}")
