"""int8_scales.json: numbers come back bit for bit, and one line lists all that is wrong with a file."""

import dataclasses
import json

import numpy as np
import pytest
from small_checkpoint import CONFIG, refusal, saved, weights
from small_models import alone

from mlx_transformer.core.checkpoint import open_checkpoint, save_checkpoint
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.heads import Head
from mlx_transformer.core.int8_scales import (
    INT8_SCALES,
    STEPS,
    SYMMETRIC,
    Int8Scales,
    ProductScales,
    multiplied_names,
    read_int8_scales,
)
from mlx_transformer.core.parameters import quantizable_shapes

ENCODER = alone("paper", "encoder")
SPLIT = TransformerConfig.from_dict(CONFIG.to_dict() | {"source_vocab_size": 6, "tie_embeddings": "none"})


def drawn(config=CONFIG, seed=0):
    """Scales of every form, in numbers that no short decimal stands for."""
    rng = np.random.default_rng(seed)
    multiplied = multiplied_names(config)
    products = {}
    for i, name in enumerate(quantizable_shapes(config)):
        a, m = np.exp(rng.normal(0, 20, 2)).astype(np.float32)
        activation = a if name in multiplied and i % 5 else None
        steps = STEPS[i % len(STEPS)] if activation is not None else SYMMETRIC
        products[name] = ProductScales(activation, steps, m if i % 4 else None)
    return Int8Scales(products, {"text": "valid.é", "sentences": 3, "share": 0.5})


def values_of(scales):
    return json.loads(scales.json())


@pytest.mark.parametrize("config", [CONFIG, SPLIT], ids=["tied", "split"])
@pytest.mark.parametrize("seed", range(5))
def test_numbers_come_back_bit_for_bit(tmp_path, config, seed):
    scales = drawn(config, seed)
    (tmp_path / INT8_SCALES).write_text(scales.json(), encoding="utf-8")
    read = read_int8_scales(tmp_path, config)
    assert read == scales
    assert parts(read) == parts(scales)


def parts(scales):
    """Every number, by its bits."""
    found = {name: (entry.activation, entry.weight) for name, entry in scales.products.items()}
    return {name: [None if part is None else part.tobytes() for part in pair] for name, pair in found.items()}


def test_a_checkpoint_keeps_its_scales(tmp_path):
    assert read_int8_scales(saved(tmp_path / "without"), CONFIG) is None
    folder = save_checkpoint(tmp_path / "with", CONFIG, weights(), texts={INT8_SCALES: drawn().json()})
    assert read_int8_scales(open_checkpoint(folder).folder, CONFIG) == drawn()


def test_a_table_that_is_only_looked_up_is_not_multiplied():
    assert "embedding.weight" in multiplied_names(CONFIG)
    assert not multiplied_names(SPLIT) & {"source_embedding.weight", "target_embedding.weight"}
    assert "output_proj.weight" in multiplied_names(SPLIT)


def test_one_line_lists_everything_wrong(tmp_path):
    values = values_of(drawn(SPLIT))
    up, down = (f"encoder.layers.0.feed_forward.{part}_proj.weight" for part in ("up", "down"))
    values["note"] = "?"
    values["products"] |= {up: {"activaton": 1.0}, down: {"activation": float("nan"), "steps": 126}}
    values["products"]["source_embedding.weight"] = {"activation": 1.0}
    values["products"]["encoder.norm.weight"] = {}
    del values["products"]["output_proj.weight"]
    (tmp_path / INT8_SCALES).write_text(json.dumps(values), encoding="utf-8")
    said = refusal(read_int8_scales, tmp_path, SPLIT)
    assert said == (
        f"{tmp_path / INT8_SCALES}: unknown key 'note'; missing output_proj.weight; "
        "source_embedding.weight is only looked up: nothing is multiplied with it; "
        f"{up}: unknown key 'activaton' (did you mean 'activation'?); "
        f"{down}: activation=nan must be a positive float32 number, and so its reciprocal; "
        f"{down}: steps=126 must be one of 127, 128, 255; unknown encoder.norm.weight"
    )


@pytest.mark.parametrize("number", [0, -1, True, "1", None, float("inf"), 1e39, 1e-39, 1e-46, 3e38, [1], 10**400])
def test_a_number_that_is_no_multiplier_is_refused(number):
    values = values_of(drawn())
    values["products"]["embedding.weight"] = {"weight": number}
    assert "embedding.weight: weight=" in refusal(Int8Scales.parse, values, CONFIG, "x")


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([], "format 'list' is not known"),
        ({"format": 2}, "format 2 is not known"),
        ({"format": 1, "products": []}, "products must be an object"),
        ({"format": 1, "products": {}, "origin": {"a": [1]}}, "origin must be an object"),
        ({"format": 1, "products": dict.fromkeys(quantizable_shapes(CONFIG), 1.0)}, "embedding.weight must be an obj"),
    ],
)
def test_another_shape_is_refused(values, said):
    assert said in refusal(Int8Scales.parse, values, CONFIG, "x")


def test_a_cut_file_is_refused(tmp_path):
    text = drawn().json()
    (tmp_path / INT8_SCALES).write_text(text[: len(text) // 2], encoding="utf-8")
    assert "damaged, or not JSON" in refusal(read_int8_scales, tmp_path, CONFIG)


def test_layers_that_stay_float32_come_back(tmp_path):
    parts = ["encoder.layers.0.feed_forward.down_proj", "encoder.layers.1"]
    scales = Int8Scales({}, {"text": "x"}).leaving(parts, ENCODER)
    assert scales.float32 == [parts[0], "encoder.layers.1.self_attention", "encoder.layers.1.feed_forward"]
    assert not scales.is_fixed
    (tmp_path / INT8_SCALES).write_text(scales.json(), encoding="utf-8")
    assert read_int8_scales(tmp_path, ENCODER) == scales
    assert scales.leaving(["embedding"], ENCODER).float32 == ["embedding", *scales.float32]
    assert drawn(ENCODER).leaving([], ENCODER) == drawn(ENCODER)
    fixed = drawn(ENCODER).leaving(["encoder.layers.1"], ENCODER)
    assert fixed.is_fixed
    assert fixed.of(f"{parts[0]}.weight") == drawn(ENCODER).of(f"{parts[0]}.weight")


def test_float32_is_said_of_encoders_alone_and_of_nothing_else():
    name = "encoder.layers.0.feed_forward.down_proj.weight"

    def said(config, **entry):
        values = values_of(drawn(config))
        values["products"][name] = entry
        return refusal(Int8Scales.parse, values, config, "x")

    assert said(ENCODER, float32=False) == f"x: {name}: float32=False must be true, and alone"
    assert said(ENCODER, float32=1) == f"x: {name}: float32=1 must be true, and alone"
    assert said(ENCODER, float32=True, weight=2.0) == f"x: {name}: float32=True must be true, and alone"
    only = "only an encoder alone has layers that int8 leaves so"
    assert said(CONFIG, float32=True) == f"x: {name}: float32: {only}"
    assert refusal(Int8Scales({}).leaving, ["embedding"], CONFIG) == f"float32 layer 'embedding': {only}"


def test_a_table_that_no_classifier_reads_is_only_looked_up():
    assert "embedding.weight" in multiplied_names(ENCODER)
    assert "embedding.weight" not in multiplied_names(dataclasses.replace(ENCODER, head=Head(kind="hidden")))
