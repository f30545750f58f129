"""Marian and Pegasus folders read and written: nothing is changed on the way, and the tokenizer goes along.

That `transformers` computes the same with them is tested in tests/consumers/test_marian.py.
"""

from __future__ import annotations

import dataclasses
import json
import re
from contextlib import suppress
from pathlib import Path

import ml_dtypes
import mlx.core as mx
import numpy as np
import pytest
from combined import thinned
from marian_folders import PAPER, edit_config, edit_tensors, written
from safetensors.numpy import load_file
from small_models import random_weights

from mlx_transformer import Tokenizer, Transformer, cli
from mlx_transformer.convert import import_huggingface, to_huggingface
from mlx_transformer.core.checkpoint import open_checkpoint, save_checkpoint
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.parameters import parameter_shapes
from mlx_transformer.core.positions import sinusoids
from mlx_transformer.families.engine import channels, reordered
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.tensors import stored_tensors

CONFIGS = {
    "paper": PAPER,
    "biases": dataclasses.replace(PAPER, attention_bias=True, output_bias=True, activation="silu", dropout=0.2),
    "unscaled": dataclasses.replace(PAPER, scale_embeddings=False, activation="gelu", encoder_layers=3),
    "target-output": dataclasses.replace(PAPER, tie_embeddings="target-output", attention_bias=True),
    "untied": dataclasses.replace(PAPER, tie_embeddings="none", output_bias=True, activation="gelu_tanh"),
    "source-target": dataclasses.replace(PAPER, tie_embeddings="source-target", output_bias=True),
    "starts with pad": dataclasses.replace(PAPER, pad_id=49, bos_id=49, eos_id=0),
    "pre-norm": dataclasses.replace(PAPER, norm_placement="pre"),
    "pre-norm, a classifier of its own": dataclasses.replace(
        PAPER, norm_placement="pre", tie_embeddings="source-target"
    ),
    "pre-norm, biases": dataclasses.replace(
        PAPER, norm_placement="pre", attention_bias=True, output_bias=True, scale_embeddings=False, activation="gelu"
    ),
}


def in_halves(config: TransformerConfig) -> TransformerConfig:
    """As a model of ours is read back: its channels stay as the published model has them."""
    return dataclasses.replace(config, positions="sinusoidal_halves")


def logits(folder: Path) -> np.ndarray:
    model = Transformer.load(folder)
    target = [[model.config.bos_id, 6, 7], [model.config.bos_id, 9, 8]]
    mask = [[True, True, True, True], [True, True, False, False]]
    return np.array(model(mx.array([[5, 6, 7, 8], [9, 4, 3, 3]]), mx.array(target), mx.array(mask)))


@pytest.mark.parametrize("name", thinned(CONFIGS, 3))
def test_there_and_back_changes_nothing(name: str, tmp_path: Path) -> None:
    config = CONFIGS[name]
    assert import_huggingface(written(tmp_path, config), tmp_path / "back") == [
        f"no tokenizer ({tmp_path / 'theirs'} has no tokenizer.json)"
    ]
    before, after = (open_checkpoint(tmp_path / folder) for folder in ("ours", "back"))
    assert after.config == in_halves(before.config)
    for name, array in reordered(dict(before.tensors()), channels(32)).items():
        assert after.tensor(name).tobytes() == array.tobytes(), name
    np.testing.assert_allclose(logits(tmp_path / "back"), logits(tmp_path / "ours"), atol=5e-6)
    again = to_huggingface(tmp_path / "back", tmp_path / "again")
    assert (again / "config.json").read_bytes() == (tmp_path / "theirs" / "config.json").read_bytes()
    first, second = (load_file(tmp_path / folder / "model.safetensors") for folder in ("theirs", "again"))
    assert first.keys() == second.keys()
    assert all(first[name].tobytes() == second[name].tobytes() for name in first)


def test_channels_are_those_of_their_position_table() -> None:
    angle = np.arange(20)[:, None] / 10000 ** (np.arange(0, 32, 2) / 32)
    expected = np.concatenate([np.sin(angle), np.cos(angle)], axis=1)
    np.testing.assert_allclose(sinusoids(20, 32)[:, channels(32)], expected, atol=1e-6)
    assert np.array_equal(sinusoids(20, 32)[:, channels(32)], sinusoids(20, 32, "sinusoidal_halves"))


def test_only_sides_of_width_d_model_are_permuted(tmp_path: Path) -> None:
    """The heads stay where they are, and so does the feed-forward net's inside."""
    theirs = load_file(written(tmp_path, CONFIGS["biases"]) / "model.safetensors")
    ours, order = dict(open_checkpoint(tmp_path / "ours").tensors()), [*range(0, 32, 2), *range(1, 32, 2)]
    layer, theirs_layer = "decoder.layers.1.", "model.decoder.layers.1."
    same = {
        "encoder_attn.q_proj.weight": ours[layer + "cross_attention.query_proj.weight"][:, order],
        "encoder_attn.q_proj.bias": ours[layer + "cross_attention.query_proj.bias"],
        "self_attn.out_proj.weight": ours[layer + "self_attention.output_proj.weight"][order],
        "self_attn.out_proj.bias": ours[layer + "self_attention.output_proj.bias"][order],
        "fc1.weight": ours[layer + "feed_forward.up_proj.weight"][:, order],
        "fc2.weight": ours[layer + "feed_forward.down_proj.weight"][order],
        "final_layer_norm.weight": ours[layer + "feed_forward_norm.weight"][order],
    }
    for name, expected in same.items():
        assert np.array_equal(theirs[theirs_layer + name], expected), name
    assert np.array_equal(theirs["final_logits_bias"], ours["output_proj.bias"][None])
    assert np.array_equal(theirs["model.shared.weight"], ours["embedding.weight"][:, order])
    assert "lm_head.weight" not in theirs


def test_the_family_is_the_one_whose_norms_stand_there(tmp_path: Path) -> None:
    """Pre-norm is Pegasus: a norm behind each stack, and one vocabulary for both languages."""
    folder = written(tmp_path, CONFIGS["pre-norm"])
    values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert (values["model_type"], values["architectures"]) == ("pegasus", ["PegasusForConditionalGeneration"])
    assert values["forced_eos_token_id"] is None  # of which transformers would else make 1
    assert not {"decoder_vocab_size", "share_encoder_decoder_embeddings"} & values.keys()
    theirs, ours = load_file(folder / "model.safetensors"), dict(open_checkpoint(tmp_path / "ours").tensors())
    order = channels(32)
    for side in ("encoder", "decoder"):
        assert np.array_equal(theirs[f"model.{side}.layer_norm.weight"], ours[f"{side}.norm.weight"][order])
        assert np.array_equal(theirs[f"model.{side}.layer_norm.bias"], ours[f"{side}.norm.bias"][order])
    # As published Pegasus models have them; CTranslate2's converter asks for the first two.
    said = {"normalize_before": True, "normalize_embedding": False, "add_final_layer_norm": True}
    assert said.items() <= values.items()
    import_huggingface(folder, tmp_path / "back")
    assert open_checkpoint(tmp_path / "back").config == in_halves(CONFIGS["pre-norm"])


def test_biases_that_we_lack_become_zeros(tmp_path: Path) -> None:
    config = dataclasses.replace(PAPER, feed_forward_bias=False)
    theirs = load_file(written(tmp_path, config) / "model.safetensors")
    zeros = {name for name, array in theirs.items() if not array.any()}
    assert {name for name in theirs if name.endswith(("_proj.bias", "fc1.bias", "fc2.bias"))} < zeros
    import_huggingface(tmp_path / "theirs", tmp_path / "back")
    back = open_checkpoint(tmp_path / "back").config
    assert (back.attention_bias, back.feed_forward_bias, back.output_bias) == (False, True, False)
    np.testing.assert_allclose(logits(tmp_path / "back"), logits(tmp_path / "ours"), atol=5e-6)


def test_shared_embeddings_with_a_classifier_of_their_own(tmp_path: Path) -> None:
    """Marian has this way to tie too."""
    folder = written(tmp_path, CONFIGS["untied"])

    def share(tensors: dict[str, np.ndarray]) -> None:
        tensors["model.shared.weight"] = tensors.pop("model.encoder.embed_tokens.weight")
        del tensors["model.decoder.embed_tokens.weight"]

    edit_tensors(folder, share)
    edit_config(folder, share_encoder_decoder_embeddings=True)
    import_huggingface(folder, tmp_path / "back")
    back, ours = open_checkpoint(tmp_path / "back"), open_checkpoint(tmp_path / "ours")
    assert back.config.tie_embeddings == "source-target"
    order = channels(32)
    assert np.array_equal(back.tensor("embedding.weight"), ours.tensor("source_embedding.weight")[:, order])
    assert np.array_equal(back.tensor("output_proj.weight"), ours.tensor("output_proj.weight")[:, order])


def test_defaults_of_transformers_fill_a_short_config(tmp_path: Path) -> None:
    """Such as encoder_layers=12, where config.json says nothing; special ids may be in generation_config.json."""
    folder = written(tmp_path, CONFIGS["starts with pad"])
    values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    keep = "model_type vocab_size d_model encoder_layers decoder_layers encoder_ffn_dim decoder_ffn_dim"
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    (folder / "config.json").write_text(json.dumps({**{key: values[key] for key in keep.split()}, **heads}))
    import_huggingface(folder, tmp_path / "back")
    c = open_checkpoint(tmp_path / "back").config
    assert (c.activation, c.scale_embeddings, c.max_positions) == ("gelu", False, 1024)
    assert (c.tie_embeddings, c.bos_id, c.pad_id, c.eos_id) == ("all", 49, 49, 0)
    assert (c.architecture, c.norm, c.norm_placement, c.norm_epsilon) == ("encoder-decoder", "layernorm", "post", 1e-5)
    assert (c.positions, c.gated, c.key_value_heads, c.d_k, c.d_v) == ("sinusoidal_halves", False, 4, 8, 8)


@pytest.mark.parametrize("dtype", [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)], ids=str)
def test_sixteen_bits_stay_sixteen(dtype: np.dtype, tmp_path: Path) -> None:
    """Through our folder and back bit for bit, with the type's name for either version of transformers."""
    folder = written(tmp_path)
    edit_tensors(folder, lambda tensors: {name: x.astype(dtype) for name, x in tensors.items()})
    import_huggingface(folder, tmp_path / "back")
    opened = open_checkpoint(tmp_path / "back")
    assert {array.dtype for _, array in opened.tensors()} == {dtype}
    assert opened.precision == dtype.name
    again = to_huggingface(tmp_path / "back", tmp_path / "again")
    theirs, ours = (stored_tensors(each / "model.safetensors") for each in (folder, again))
    assert ours.keys() <= theirs.keys()
    for name, array in ours.items():
        assert array.dtype == dtype
        assert np.asarray(array).tobytes() == np.asarray(theirs[name]).tobytes()
    config = json.loads((again / "config.json").read_text(encoding="utf-8"))
    assert config["dtype"] == config["torch_dtype"] == dtype.name


def test_tables_and_copies_in_the_file_are_compared(tmp_path: Path) -> None:
    folder = written(tmp_path)
    table = np.asarray(sinusoids(40, 32)[:, channels(32)], order="C")
    more = {f"model.{side}.embed_positions.weight": table for side in ("encoder", "decoder")}
    edit_tensors(folder, lambda tensors: {**tensors, **more, "lm_head.weight": tensors["model.shared.weight"]})
    import_huggingface(folder, tmp_path / "back")
    np.testing.assert_allclose(logits(tmp_path / "back"), logits(tmp_path / "ours"), atol=5e-6)


def test_every_parameter_has_a_name_of_theirs(tmp_path: Path) -> None:
    for name, config in CONFIGS.items():
        theirs = load_file(written(tmp_path / name, config) / "model.safetensors")
        biases = dataclasses.replace(config, attention_bias=True, output_bias=True)
        copies = 2 if config.own_classifier and config.one_embedding else 0
        assert len(theirs) == len(parameter_shapes(biases)) + copies


@pytest.fixture(scope="module")
def with_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = Tokenizer.train(["one two three. four five six! " * 3], vocab_size=270)
    config = dataclasses.replace(PAPER, vocab_size=tokenizer.vocab_size, source_vocab_size=tokenizer.vocab_size)
    save_checkpoint(folder / "ours", config, random_weights(config), tokenizer.to_json())
    return folder


def test_the_tokenizer_goes_along(with_tokenizer: Path, tmp_path: Path) -> None:
    theirs = to_huggingface(with_tokenizer / "ours", tmp_path / "theirs")
    settings = json.loads((theirs / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert (settings["eos_token"], settings["pad_token"], settings["padding_side"]) == ("</s>", "<pad>", "right")
    assert import_huggingface(theirs, tmp_path / "back") == []
    assert (tmp_path / "back" / "tokenizer.json").read_bytes() == (theirs / "tokenizer.json").read_bytes()


@pytest.mark.parametrize("damage", ["cut", "bytes"])
def test_a_damaged_tokenizer_is_refused(with_tokenizer: Path, tmp_path: Path, damage: str) -> None:
    """It may be the model's, which would be imported without a word that it can read."""
    theirs = tmp_path / "theirs"
    to_huggingface(with_tokenizer / "ours", theirs)
    text = (theirs / "tokenizer.json").read_bytes()
    (theirs / "tokenizer.json").write_bytes(text[:-9] if damage == "cut" else text[:50] + b"\xff" + text[51:])
    with pytest.raises(UserError, match=r"tokenizer\.json: (damaged, or not JSON|cannot be read \(not UTF-8)"):
        import_huggingface(theirs, tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_a_tokenizer_of_another_kind_stays_behind(with_tokenizer: Path, tmp_path: Path) -> None:
    theirs = to_huggingface(with_tokenizer / "ours", tmp_path / "theirs")
    edit_config(theirs, pad_token_id=3, decoder_start_token_id=3)
    (note,) = import_huggingface(theirs, tmp_path / "back")
    assert json.loads((tmp_path / "back" / "generation.json").read_text(encoding="utf-8"))["suppressed"] == [0, 1]
    assert "pad_id is 0 in the tokenizer and 3 in the model; bos_id is 1" in note
    (theirs / "tokenizer.json").write_text('{"model": {"type": "Unigram"}}')
    note = import_huggingface(theirs, tmp_path / "back", force=True)[-1]
    assert note.startswith("no tokenizer (")
    assert "tokenizer.json: " in note
    assert not (tmp_path / "back" / "tokenizer.json").exists()


def test_bans_of_words_and_of_several_come_along(tmp_path: Path) -> None:
    folder = written(tmp_path)
    values = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))
    (folder / "generation_config.json").write_text(json.dumps({**values, "bad_words_ids": [[0], [7, 8]]}))
    assert not any("banned" in note for note in import_huggingface(folder, tmp_path / "back"))
    settings = json.loads((tmp_path / "back" / "generation.json").read_text(encoding="utf-8"))
    assert settings["banned_sequences"] == [[7, 8]]  # padding is never written anyway


def test_the_commands(with_tokenizer: Path, tmp_path: Path, capfd) -> None:
    def call(*arguments: object) -> str:
        with suppress(SystemExit):
            cli.main([str(argument) for argument in arguments])
        return "".join(capfd.readouterr())

    theirs, back = tmp_path / "theirs", tmp_path / "back"
    assert call("to-huggingface", with_tokenizer / "ours", theirs).startswith(f"{theirs}: ")
    told = call("import", theirs, back)
    assert re.fullmatch(rf"{back}: imported: encoder-decoder, [\d,]+ parameters in float32, with its tokenizer\n", told)
    assert open_checkpoint(back).config == in_halves(open_checkpoint(with_tokenizer / "ours").config)
    edit_config(theirs, normalize_before=True)
    message = f"mlx-transformer: {theirs / 'config.json'}: normalize_before is on\n"
    assert call("import", theirs, tmp_path / "new") == message
