"""The exported graphs compute what MLX computes: full, step by step, merged, with beams, under any padding."""

from functools import cache
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from combined import thinned
from small_models import CHOICES, SIZES, alone, configs, encoder_decoder, random_weights

from export.graph.protos import add_taps
from export.package import export_onnx
from mlx_transformer import Transformer
from mlx_transformer.core.checkpoint import save_checkpoint
from mlx_transformer.core.config import TransformerConfig

CLOSE = dict(rtol=0, atol=2e-5)  # logits are of size 1 to 5; float32 differs by about 1e-6


class Model:
    """One model in both forms."""

    def __init__(self, config: TransformerConfig, folder: Path):
        weights = random_weights(config)
        self.config = config
        self.mlx = Transformer.from_weights(config, weights)
        self.folder = export_onnx(save_checkpoint(folder / "model", config, weights), folder / "onnx")
        self.sessions = {path.stem: session(path) for path in (self.folder / "onnx").glob("*.onnx")}

    def run(self, graph: str, **feeds: np.ndarray) -> dict[str, np.ndarray]:
        return run(self.sessions[graph], **feeds)

    def empty(self, graph: str, rows: int) -> dict[str, np.ndarray]:
        pasts = [entry for entry in self.sessions[graph].get_inputs() if entry.name.startswith("past_key_values")]
        shapes = {entry.name: entry.shape[1:] for entry in pasts}
        return {
            name: np.zeros((rows, axes[0], 0, axes[2]) if len(axes) > 1 else (rows, *axes), np.float32)
            for name, axes in shapes.items()
        }


def session(path: Path | bytes) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    return ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def run(opened: ort.InferenceSession, **feeds: np.ndarray) -> dict[str, np.ndarray]:
    inputs = {entry.name for entry in opened.get_inputs()}
    outputs = [entry.name for entry in opened.get_outputs()]
    values = opened.run(outputs, {name: value for name, value in feeds.items() if name in inputs})
    return dict(zip(outputs, values, strict=True))


def as_past(presents: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name.replace("present", "past_key_values"): x for name, x in presents.items() if "present" in name}


def positions(mask: np.ndarray) -> np.ndarray:
    return np.maximum(np.cumsum(mask, axis=1) - 1, 0)


def source(config: TransformerConfig, seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Ids (3, 7) without padding, with some on the right, with some on the left."""
    ids = np.random.default_rng(seed).integers(3, config.source_vocab_size, (3, 7))
    mask = np.ones((3, 7), np.int64)
    mask[1, 5:] = mask[2, :3] = 0
    return ids, mask


def target(config: TransformerConfig) -> np.ndarray:
    return np.random.default_rng(2).integers(3, config.vocab_size, (3, 6))


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return cache(lambda name: Model(configs()[name], tmp_path_factory.mktemp("model")))


@pytest.mark.fast("two vocabularies", "causal=True")
@pytest.mark.parametrize("name", thinned(CHOICES, 4))
def test_encoder_decoder(models, name):
    model = models(name)
    (ids, mask), target_ids = source(model.config), target(model.config)
    expected = np.array(model.mlx(ids, target_ids, mask))
    memory = model.run("encoder_model", input_ids=ids, attention_mask=mask)["last_hidden_state"]
    inputs = dict(encoder_hidden_states=memory, encoder_attention_mask=mask)

    full = model.run("decoder_model", input_ids=target_ids, **inputs)
    np.testing.assert_allclose(full["logits"], expected, **CLOSE)

    places = positions(np.ones_like(target_ids))
    first = model.run("decoder_model", input_ids=target_ids[:, :2], **inputs)
    past = as_past(first)
    for part in (slice(2, 3), slice(3, 6)):  # one token, then several at once
        outputs = model.run(
            "decoder_with_past_model",
            input_ids=target_ids[:, part],
            position_ids=places[:, part],
            encoder_attention_mask=mask,
            **past,
        )
        np.testing.assert_allclose(outputs["logits"], expected[:, part], **CLOSE)
        past |= as_past(outputs)
    for key, value in as_past(full).items():
        np.testing.assert_allclose(past[key], value, **CLOSE)


@pytest.mark.fast("positions=sinusoidal_halves", "norm_bias=False")
@pytest.mark.parametrize("name", thinned(CHOICES, 2))
def test_merged_decoder(models, name):
    model = models(name)
    (ids, mask), target_ids = source(model.config), target(model.config)
    expected = np.array(model.mlx(ids, target_ids, mask))
    memory = model.run("encoder_model", input_ids=ids, attention_mask=mask)["last_hidden_state"]
    flag, graph = np.array([False]), "decoder_model_merged"
    places = positions(np.ones_like(target_ids))
    inputs = dict(encoder_attention_mask=mask, position_ids=places[:, :4], **model.empty(graph, 3))
    outputs = model.run(
        graph, input_ids=target_ids[:, :4], encoder_hidden_states=memory, use_cache_branch=flag, **inputs
    )
    np.testing.assert_allclose(outputs["logits"], expected[:, :4], **CLOSE)

    # The encoder's output is not read any more: its keys and values are cached.
    inputs = dict(encoder_attention_mask=mask, encoder_hidden_states=memory * np.nan, use_cache_branch=~flag)
    outputs = model.run(graph, input_ids=target_ids[:, 4:], position_ids=places[:, 4:], **inputs, **as_past(outputs))
    np.testing.assert_allclose(outputs["logits"], expected[:, 4:], **CLOSE)


@pytest.mark.parametrize("name", ["paper", "modern"])
def test_beams_share_the_source(models, name):
    """Six rows over two sentences: keys and values of the source come once a sentence."""
    model = models(name)
    (ids, mask), target_ids = source(model.config), target(model.config)
    ids, mask, target_ids = ids[:2], mask[:2], np.concatenate([target_ids, target_ids[::-1]])
    beams = [0, 0, 0, 1, 1, 1]
    expected = np.array(model.mlx(ids[beams], target_ids, mask[beams]))
    memory = model.run("encoder_model", input_ids=ids, attention_mask=mask)["last_hidden_state"]
    inputs = dict(encoder_hidden_states=memory, encoder_attention_mask=mask)
    cross = model.run("decoder_model", input_ids=target_ids[:2], **inputs)
    first = model.run(
        "decoder_model",
        input_ids=target_ids[:, :5],
        encoder_hidden_states=memory[beams],
        encoder_attention_mask=mask[beams],
    )
    past = {name: x for name, x in as_past(first).items() if ".decoder." in name}
    past |= {name: x for name, x in as_past(cross).items() if ".encoder." in name}
    outputs = model.run("decoder_with_past_model", input_ids=target_ids[:, 5:], encoder_attention_mask=mask, **past)
    np.testing.assert_allclose(outputs["logits"], expected[:, 5:], **CLOSE)


@pytest.mark.parametrize("name", thinned(CHOICES, 4))
def test_decoder_alone(models, name):
    model = models(f"{name}, decoder")
    ids, mask = source(model.config)
    mask[1] = 1  # padding on the left only
    real = mask.astype(bool)
    expected = np.array(model.mlx(ids, mask))
    start = model.empty("model", 3)
    full = model.run("model", input_ids=ids, attention_mask=mask, position_ids=positions(mask), **start)
    np.testing.assert_allclose(full["logits"][real], expected[real], **CLOSE)

    p = positions(mask)
    outputs = model.run("model", input_ids=ids[:, :4], attention_mask=mask[:, :4], position_ids=p[:, :4], **start)
    outputs = model.run("model", input_ids=ids[:, 4:], attention_mask=mask, position_ids=p[:, 4:], **as_past(outputs))
    np.testing.assert_allclose(outputs["logits"], expected[:, 4:], **CLOSE)


@pytest.mark.parametrize("name", thinned(CHOICES, 3))
def test_encoder_alone(models, name):
    model = models(f"{name}, encoder")
    ids, mask = source(model.config)
    real = mask.astype(bool)
    outputs = model.run("model", input_ids=ids, attention_mask=mask)
    np.testing.assert_allclose(outputs["logits"][real], np.array(model.mlx(ids, mask))[real], **CLOSE)
    np.testing.assert_allclose(outputs["last_hidden_state"][real], np.array(model.mlx.encode(ids, mask))[real], **CLOSE)


@pytest.mark.parametrize("name", ["paper", "modern", "odd widths"])
def test_padding_changes_nothing(models, name):
    """A sentence alone, padded on the left, on the right: the same hidden states at its tokens."""
    model = models(name)
    ids, _ = source(model.config)
    unpadded = model.run("encoder_model", input_ids=ids[:1], attention_mask=np.ones((1, 7), np.int64))
    for left, right in ((3, 0), (0, 3), (2, 1)):
        padded = np.pad(ids[:1], ((0, 0), (left, right)))
        mask = np.pad(np.ones((1, 7), np.int64), ((0, 0), (left, right)))
        outputs = model.run("encoder_model", input_ids=padded, attention_mask=mask)["last_hidden_state"]
        np.testing.assert_allclose(outputs[:, left : left + 7], unpadded["last_hidden_state"], **CLOSE)


@pytest.mark.parametrize(
    ("name", "graph", "mask"),
    [
        ("paper", "encoder_model", "attention_mask"),
        ("paper", "decoder_model", "encoder_attention_mask"),
        ("paper", "decoder_with_past_model", "encoder_attention_mask"),
        ("paper", "decoder_model_merged", "encoder_attention_mask"),
        ("modern, decoder", "model", "attention_mask"),
        ("modern, encoder", "model", "attention_mask"),
    ],
)
def test_every_mask_matters(models, name, graph, mask):
    """Hiding one position of any accepted mask changes the output; hiding what is hidden does not."""
    model = models(name)
    rng = np.random.default_rng(3)
    sizes = dict.fromkeys(("batch_size", "sentences"), 1)
    feeds = {}
    for entry in model.sessions[graph].get_inputs():
        shape = [axis if isinstance(axis, int) else sizes.get(axis, 8 if "+" in axis else 4) for axis in entry.shape]
        if entry.name == "use_cache_branch":
            feeds[entry.name] = np.array([True])
        elif entry.type == "tensor(int64)":
            feeds[entry.name] = np.ones(shape, np.int64) if "mask" in entry.name else rng.integers(3, 40, shape)
        else:
            feeds[entry.name] = rng.standard_normal(shape, dtype=np.float32)
    if "position_ids" in feeds:
        feeds["position_ids"] = np.arange(4, 8)[None]
    before = run(model.sessions[graph], **feeds)
    output = next(iter(before))
    for position in range(feeds[mask].shape[1] - 1):
        hidden = feeds[mask].copy()
        hidden[0, position] = 0
        after = run(model.sessions[graph], **{**feeds, mask: hidden})[output]
        assert np.abs(after - before[output]).max() > 1e-3, f"{mask}[{position}] is not read"


@pytest.mark.parametrize("name", ["paper", "modern", "odd widths"])
def test_a_position_past_the_table_is_an_error(models, name):
    """Whatever the optimiser makes of the Gather, too long a sequence never passes silently."""
    model = models(name)
    most = model.config.max_positions
    ids, mask = np.full((1, most + 1), 5), np.ones((1, most + 1), np.int64)
    memory = model.run("encoder_model", input_ids=ids[:, :most], attention_mask=mask[:, :most])["last_hidden_state"]
    with pytest.raises(Exception, match=r"(?i)gather|broadcast|shape"):
        model.run("encoder_model", input_ids=ids, attention_mask=mask)
    inputs = dict(encoder_hidden_states=memory, encoder_attention_mask=mask[:, :most])
    past = as_past(model.run("decoder_model", input_ids=ids[:, :most], **inputs))
    with pytest.raises(Exception, match=r"(?i)gather|broadcast|shape"):
        model.run("decoder_with_past_model", input_ids=ids[:, :1], encoder_attention_mask=mask[:, :most], **past)


@pytest.mark.parametrize("name", ["modern", "paper", "modern, decoder", "untied, encoder"])
def test_taps_are_those_of_mlx(models, name):
    model = models(name)
    (ids, mask), target_ids = source(model.config), target(model.config)
    mask[:] = 1
    expected = {}
    both = model.config.architecture == "encoder-decoder"
    model.mlx(*((ids, target_ids) if both else (ids,)), tap=lambda tap, x: expected.__setitem__(tap, np.array(x)))
    outputs = {}
    for graph in ("encoder_model", "decoder_model") if both else ("model",):
        path = model.folder / "onnx" / f"{graph}.onnx"
        tapped = add_taps(onnx.load(path), list(expected))  # with its data: it has no folder of its own
        feeds = dict(input_ids=ids, attention_mask=mask, position_ids=positions(mask))
        if graph == "decoder_model":
            memory = outputs["last_hidden_state"]
            feeds = dict(input_ids=target_ids, encoder_hidden_states=memory, encoder_attention_mask=mask)
        elif graph == "model" and model.config.has_decoder:
            feeds |= model.empty(graph, 3)
        outputs |= run(session(tapped.SerializeToString()), **feeds)
    for tap, value in expected.items():
        np.testing.assert_allclose(outputs[tap], value, err_msg=tap, **CLOSE)


def test_batch_and_lengths_are_dynamic(models):
    """Sizes of 1, and sizes that differ from one another, in every graph."""
    model = models("modern")
    for rows, length, width in ((1, 1, 1), (2, 5, 3), (5, 2, 9)):
        ids, mask = np.full((rows, width), 7), np.ones((rows, width), np.int64)
        memory = model.run("encoder_model", input_ids=ids, attention_mask=mask)["last_hidden_state"]
        assert memory.shape == (rows, width, SIZES["d_model"])
        inputs = dict(encoder_hidden_states=memory, encoder_attention_mask=mask)
        outputs = model.run("decoder_model", input_ids=np.full((rows, length), 7), **inputs)
        assert outputs["logits"].shape == (rows, length, SIZES["vocab_size"])
        assert outputs["present.1.decoder.key"].shape == (rows, 2, length, 8)
        assert outputs["present.1.encoder.value"].shape == (rows, 2, width, 8)


def test_fixed_axes_are_heads_and_widths_alone(models):
    for name, config in (
        ("odd widths", encoder_decoder("odd widths")),
        ("odd widths, decoder", alone("odd widths", "decoder")),
    ):
        for opened in models(name).sessions.values():
            for entry in [*opened.get_inputs(), *opened.get_outputs()]:
                fixed = {
                    "past_key_values": {1: config.key_value_heads, 3: config.d_k},
                    "present": {1: config.key_value_heads, 3: config.d_k},
                    "logits": {2: config.vocab_size},
                    "encoder_hidden_states": {2: config.d_model},
                    "last_hidden_state": {2: config.d_model},
                    "use_cache_branch": {0: 1},
                }.get(entry.name.split(".")[0], {})
                if entry.name.endswith("value"):
                    fixed = {**fixed, 3: config.d_v}
                assert {i: axis for i, axis in enumerate(entry.shape) if isinstance(axis, int)} == fixed, entry.name
