"""Folders of sentence-transformers, read and written."""

import itertools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mlx_transformer.core.text_embedding import Dense, TextEmbedding
from mlx_transformer.families.sentence_folder import (
    CLASSES,
    FLAGS,
    dense_weights,
    read_sentence_folder,
    sentence_files,
)
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.tensors import write_tensors

D = 6
MODELS = "sentence_transformers.models."
MINILM = {
    "modules.json": [
        {"idx": 0, "name": "0", "path": "", "type": f"{MODELS}Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": f"{MODELS}Pooling"},
        {"idx": 2, "name": "2", "path": "2_Normalize", "type": f"{MODELS}Normalize"},
    ],
    "1_Pooling/config.json": {"word_embedding_dimension": 384, "pooling_mode_mean_tokens": True},
    "sentence_bert_config.json": {"max_seq_length": 256, "do_lower_case": False},
}
"""The files of all-MiniLM-L6-v2 that say how its vectors are made."""


def write(folder: Path, files: dict) -> Path:
    for name, values in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(values))
    return folder


def read(folder: Path, **changed) -> TextEmbedding:
    """changed: keys of the pooling's file."""
    files = {**MINILM, "1_Pooling/config.json": changed} if changed else MINILM
    return read_sentence_folder(write(folder, files)).embedding


def test_the_files_of_a_published_model(tmp_path):
    write(tmp_path, MINILM)
    write(tmp_path, {"tokenizer.json": {"truncation": {"max_length": 128}}})
    found = read_sentence_folder(tmp_path)
    assert found.network == tmp_path
    assert found.embedding == TextEmbedding(pooling=["mean"], normalize=True, max_length=256, dense=[])
    assert found.notes == [
        "tokenizer.json ends texts after 128 tokens, sentence_bert_config.json after 256, which counts"
    ]


@pytest.mark.parametrize("way", FLAGS)
def test_each_way_by_its_flag_and_by_its_newer_name(tmp_path, way):
    flag, newer = FLAGS[way]
    flags = {"pooling_mode_mean_tokens": False, flag: True}
    assert list(read(tmp_path, **flags).pooling) == [way]
    assert list(read(tmp_path, pooling_mode=newer).pooling) == [way]


def test_several_ways_have_an_order_and_the_mean_is_one_where_nothing_is_said_of_it(tmp_path):
    both = {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}
    assert list(read(tmp_path, **both).pooling) == ["cls", "mean", "last"]
    assert list(read(tmp_path, word_embedding_dimension=6).pooling) == ["mean"]
    assert list(read(tmp_path, pooling_mode=["mean", "cls"]).pooling) == ["mean", "cls"]
    assert not read(tmp_path, include_prompt=False).prompt_counts


def test_prompts_limits_and_lower_casing(tmp_path):
    more = {"prompts": {"query": "query: ", "document": ""}, "default_prompt_name": "query"}
    write(tmp_path, {**MINILM, "config_sentence_transformers.json": {**more, "similarity_fn_name": "dot"}})
    (tmp_path / "sentence_bert_config.json").unlink()
    write(tmp_path, {"sentence_roberta_config.json": {"max_seq_length": 77, "do_lower_case": True}})
    found = read_sentence_folder(tmp_path).embedding
    assert (found.prompt(), found.prompt("document"), found.similarity) == ("query: ", "", "dot")
    assert (found.max_length, found.lower_case) == (77, True)
    (tmp_path / "sentence_roberta_config.json").unlink()
    assert read_sentence_folder(tmp_path).embedding.max_length is None
    write(tmp_path, {"tokenizer_config.json": {"model_max_length": 512}})
    assert read_sentence_folder(tmp_path).embedding.max_length == 512


@pytest.mark.parametrize("ways", [["max", "mean"], ["last", "max"]])
def test_what_is_written_is_read_again(tmp_path, ways):
    random = np.random.default_rng(0)
    widths, layers, weights = [2 * D, 5, 4], [], {}
    for i, (before, width) in enumerate(itertools.pairwise(widths)):
        layers.append(Dense(width=width, activation=["gelu", "identity"][i], bias=i == 0))
        weights[f"dense.{i}.weight"] = random.standard_normal((width, before)).astype(np.float32)
    weights["dense.0.bias"] = random.standard_normal(5).astype(np.float32)
    told = TextEmbedding(
        **dict(pooling=ways, dense=layers, normalize=True, max_length=20, lower_case=True),
        **dict(prompts={"q": "q: "}, default_prompt="q", prompt_counts=False, similarity="cosine", weights=weights),
    )
    write(tmp_path, sentence_files(told, D, 40))
    for name, arrays in dense_weights(told):
        write_tensors(tmp_path / name / "model.safetensors", arrays)
    found = read_sentence_folder(tmp_path).embedding
    assert found == told
    found.check_fits(D, "here")
    rows, mask = random.standard_normal((2, 3, D)), np.array([[1, 1, 1], [1, 1, 0]])
    np.testing.assert_array_equal(found.vectors(rows, mask), told.vectors(rows, mask))


def test_no_text_is_longer_than_the_encoder_takes():
    limits = [sentence_files(TextEmbedding(max_length=n), D, 40)["sentence_bert_config.json"] for n in (None, 20, 99)]
    assert [each["max_seq_length"] for each in limits] == [40, 20, 40]


def test_a_layer_without_a_word_on_it_has_a_hyperbolic_tangent(tmp_path):
    modules = [*MINILM["modules.json"][:2], {"idx": 2, "name": "2", "path": "2_Dense", "type": f"{MODELS}Dense"}]
    write(tmp_path, {**MINILM, "modules.json": modules, "2_Dense/config.json": {"in_features": D, "out_features": 3}})
    write_tensors(tmp_path / "2_Dense/model.safetensors", {"linear.weight": np.ones((3, D), np.float32)})
    embedding = read_sentence_folder(tmp_path).embedding
    assert list(embedding.dense) == [Dense(width=3, activation="tanh", bias=False)]
    write(tmp_path, {"2_Dense/config.json": {"activation_function": "torch.nn.modules.activation.ELU"}})
    with pytest.raises(UserError, match=r"'torch.nn.modules.activation.ELU' is not one of"):
        read_sentence_folder(tmp_path)
    write(tmp_path, {"2_Dense/config.json": {"activation_function": CLASSES["tanh"], "use_residual": True}})
    with pytest.raises(UserError, match="use_residual is on; read are layers whose input isn't added"):
        read_sentence_folder(tmp_path)
    named = {"activation_function": CLASSES["tanh"], "module_input_name": "token_embeddings"}
    write(tmp_path, {"2_Dense/config.json": named})
    with pytest.raises(UserError, match="module_input_name is 'token_embeddings'; read are layers of the pooled"):
        read_sentence_folder(tmp_path)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (["Transformer", "LSTM"], "'sentence_transformers.models.LSTM' is none of the parts that are read"),
        (["Transformer", "Pooling", "Normalize", "Dense"], "its parts are Transformer, Pooling, Normalize, Dense"),
        (["Pooling"], "its parts are Pooling; read are Transformer, then Pooling"),
    ],
)
def test_other_parts_are_refused_by_name(tmp_path, parts, message):
    modules = [{"path": f"{i}_{kind}" * bool(i), "type": MODELS + kind} for i, kind in enumerate(parts)]
    with pytest.raises(UserError, match=message):
        read_sentence_folder(write(tmp_path, {**MINILM, "modules.json": modules}))


@pytest.mark.parametrize(
    ("file", "values", "message"),
    [
        ("modules.json", {}, "modules.json: expected a list of parts"),
        ("modules.json", [{"path": "../x", "type": f"{MODELS}Transformer"}], "'../x' is no folder within it"),
        ("modules.json", [{"path": "", "type": "os.system"}], "'os.system' is none of the parts"),
        ("1_Pooling/config.json", {"pooling_mode": "median"}, "pooling_mode 'median' is not one of cls, max"),
        ("1_Pooling/config.json", {"pooling_mode_mean_tokens": False}, "pooling must be a list of at least one way"),
        ("sentence_bert_config.json", {"max_seq_length": "long"}, "max_seq_length is 'long', not a whole number"),
        (
            "sentence_bert_config.json",
            {"transformer_task": "fill-mask"},
            "gives 'fill-mask'; read are folders that pool",
        ),
        (
            "sentence_bert_config.json",
            {"modality_config": {"text": {"method_output_name": "pooler_output"}}},
            "gives 'pooler_output'; read are",
        ),
        ("sentence_bert_config.json", {"module_output_name": ["x"]}, r"module_output_name is \['x'\], not a string"),
        ("sentence_bert_config.json", {"query_length": 32}, "query_length is 32, which isn't read"),
        (
            "1_Pooling/config.json",
            {"pooling_mode": "cls", "include_prompt": False},
            "include_prompt is off; which token is the first then",
        ),
        ("config_sentence_transformers.json", {"prompts": 5}, "prompts is 5, not an object"),
        ("config_sentence_transformers.json", {"prompts": {"query": 5}}, "prompts must be an object of texts"),
    ],
)
def test_damage_is_one_line(tmp_path, file, values, message):
    write(tmp_path, {**MINILM, file: values})
    with pytest.raises(UserError, match=message) as error:
        read_sentence_folder(tmp_path)
    assert "\n" not in str(error.value)


def test_what_names_no_prompt_is_told(tmp_path):
    write(
        tmp_path, {**MINILM, "config_sentence_transformers.json": {"prompts": {"a": "b"}, "default_prompt_name": "c"}}
    )
    assert read_sentence_folder(tmp_path).notes == ["its default prompt 'c' is none of its prompts"]


def test_fields_stay_when_one_changes():
    told = TextEmbedding(pooling=["cls"], normalize=True)
    assert (
        sentence_files(replace(told, normalize=False), D, 9)["modules.json"]
        == sentence_files(told, D, 9)["modules.json"][:-1]
    )
