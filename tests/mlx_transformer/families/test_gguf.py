"""GGUF files as folders of transformers: names, keys, the order of rows, integers, and the vocabulary."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import tokenizers
from makers_tokenizers import SPECIAL, START, hard_texts, makers_json
from random_models import random_weights

from export import export_onnx
from export.validate import compare
from mlx_transformer.commands.models import open_folder
from mlx_transformer.convert import import_huggingface, to_gguf
from mlx_transformer.core.checkpoint import open_checkpoint, save_checkpoint
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.positions import rotary_frequencies
from mlx_transformer.core.quantization import KEY, Scheme
from mlx_transformer.families.conversion import read_published
from mlx_transformer.families.gguf import ARCHITECTURES, halves, read_gguf_model
from mlx_transformer.families.gguf_text import UNSAID, text_files, text_keys
from mlx_transformer.generation.settings import read_settings, settings_text
from mlx_transformer.system import gguf_files
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.gguf_files import read_gguf, write_gguf
from mlx_transformer.system.tensors import Stored, number_type
from mlx_transformer.text.tokenizer import Tokenizer

UINT8 = onnx.TensorProto.UINT8
WORDS = {"tokenizer.ggml.model": "no_vocab"}
SIZES = {"embedding_length": 64, "block_count": 2, "feed_forward_length": 96, "attention.head_count": 4}
SIZES |= {"attention.head_count_kv": 2, "context_length": 128, "attention.layer_norm_rms_epsilon": 1e-5}


@pytest.fixture
def text_pairs() -> dict:
    """A byte-level vocabulary: letters of bytes, two merges, and tokens of other kinds."""
    letters = [*tokenizers.pre_tokenizers.ByteLevel.alphabet()]
    tokens = ["<|end|>", *sorted(letters), "he", "hel", "<tool>"]
    types = np.array([3, *[1] * 258, 4], np.int32)
    keys = {"model": "gpt2", "pre": "qwen2", "tokens": tokens, "token_type": types, "merges": ["h e", "he l"]}
    return {f"tokenizer.ggml.{key}": value for key, value in {**keys, "eos_token_id": 0, "bos_token_id": 0}.items()}


def write(tmp_path, name="llama", keys=None, tensors=None, text=None) -> Path:
    """Write a file of two layers. keys: behind the architecture's name; None: without."""
    own = {key: value for key, value in {**SIZES, **(keys or {})}.items() if value is not None}
    pairs = {"general.architecture": name} | {f"{name}.{key}": value for key, value in own.items()} | (text or {})
    embedding = np.arange(10 * 64, dtype=np.float32).reshape(10, 64)
    arrays = {"token_embd.weight": (embedding, "F32"), **(tensors or {})}
    write_gguf(tmp_path / "x.gguf", pairs, arrays)
    return tmp_path / "x.gguf"


def model(*arguments, **options):
    return read_gguf_model(write(*arguments, **options))


def test_queries_and_keys_get_their_rows_back(tmp_path, text_pairs):
    """The inverse of llama.cpp's converter: W.reshape(h, 2, r / 2, ...).swapaxes(1, 2); on integers too."""
    query, key = (
        np.random.default_rng(i).standard_normal((rows, 64)).astype(np.float32) for i, rows in ((0, 64), (1, 32))
    )

    def turned(array, heads):
        return array.reshape(heads, 2, -1, 64).swapaxes(1, 2).reshape(array.shape)

    bias = np.arange(64, dtype=np.float32)
    stored = {"blk.1.attn_q.weight": (turned(query, 4), "Q8_0"), "blk.1.attn_k.weight": (turned(key, 2), "F32")}
    stored["blk.1.attn_q.bias"] = turned(bias[:, None].repeat(64, 1), 4)[:, 0], "F32"
    found = model(tmp_path, tensors=stored, text=text_pairs).published.tensors
    np.testing.assert_array_equal(found["model.layers.1.self_attn.k_proj.weight"], key)
    np.testing.assert_array_equal(found["model.layers.1.self_attn.q_proj.bias"], bias)
    name = "model.layers.1.self_attn.q_proj"
    sixteen = [found[f"{name}.{part}"] for part in ("scales", "biases")]
    assert {array.dtype for array in sixteen} == {np.dtype(np.float16)}
    wide = {
        f"{name}.{part}": array.astype(np.float32) for part, array in zip(("scales", "biases"), sixteen, strict=True)
    }
    packed = Scheme(32, 8).packed(f"{name}.weight", {**found, **wide})
    as_stored = np.asarray(read_gguf(tmp_path / "x.gguf").tensors["blk.1.attn_q.weight"].stored())
    np.testing.assert_array_equal(turned(packed.dequantised(), 4), as_stored)


def test_other_architectures_keep_their_rows(tmp_path):
    query = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    assert not np.array_equal(halves(64, 4), np.arange(64))
    found = model(tmp_path, "qwen2", tensors={"blk.0.attn_q.weight": (query, "F32")}).published.tensors
    np.testing.assert_array_equal(found["model.layers.0.self_attn.q_proj.weight"], query)


def test_scales_that_are_no_halves_are_float32(tmp_path):
    """A bias of -128 d overflows where d is 600."""
    weights = np.full((2, 32), 600 * 127.0, np.float32)
    found = model(tmp_path, tensors={"output.weight": (weights, "Q8_0")}).published
    assert found.tensors["lm_head.biases"].dtype == np.float32
    packed = Scheme(32, 8).packed("lm_head.weight", found.tensors)
    np.testing.assert_array_equal(packed.dequantised(), weights)
    assert found.config[KEY] == {"group_size": 32, "bits": 8, "mode": "affine"}


SAME = {"num_hidden_layers": 2, "rms_norm_eps": 1e-5, "vocab_size": 10, "tie_word_embeddings": True, "head_dim": 16}
SLIDING = ["sliding_attention", "full_attention"]
CONFIGS = [
    ("llama", {}, {**SAME, "model_type": "llama", "num_key_value_heads": 2, "rope_theta": 1e4, "bos_token_id": None}),
    ("llama", {"attention.head_count_kv": None}, {"num_key_value_heads": 4}),
    ("llama", {"attention.head_count_kv": np.array([2, 2], np.int32)}, {"num_key_value_heads": 2}),
    ("llama", {"attention.key_length": 24, "attention.value_length": 24}, {"head_dim": 24}),
    ("llama", {"rope.freq_base": 500000.0, "expert_count": 0}, {"rope_theta": 500000.0}),
    ("phi3", {"rope.dimension_count": 12}, {"partial_rotary_factor": 0.75}),
    ("qwen3", {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32},
     {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}}),
    ("gemma3", {"attention.sliding_window": 7, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0},
     {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rope_local_base_freq": 10000.0, "sliding_window": 7}),
    ("gemma3", {"rope.freq_base_swa": 20000.0, "attention.sliding_window_pattern": np.array([True, False])},
     {"layer_types": SLIDING, "rope_local_base_freq": 20000.0, "query_pre_attn_scalar": 16}),
    ("gemma3", {"block_count": 62}, {"layer_types": ([SLIDING[0]] * 5 + SLIDING[1:]) * 10 + [SLIDING[0]] * 2}),
    ("gemma3", {"block_count": 62, "attention.key_length": 24, "attention.value_length": 24},
     {"query_pre_attn_scalar": 16, "model_type": "gemma3_text"}),
    ("gemma2", {"attn_logit_softcapping": 50.0, "attention.sliding_window": 7},
     {"attn_logit_softcapping": 50.0, "layer_types": SLIDING, "hidden_activation": "gelu_pytorch_tanh"}),
    ("granite", {"embedding_scale": 12.0, "residual_scale": 0.22, "attention.scale": 0.0156, "logit_scale": 8.0},
     {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 8.0}),
    ("smollm3", {}, {"no_rope_layer_interval": 4}),
    ("gpt2", {"attention.layer_norm_rms_epsilon": None, "attention.layer_norm_epsilon": 1e-5}
     | {"attention.head_count_kv": None},
     {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_inner": 96, "n_positions": 128, "layer_norm_epsilon": 1e-5}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "keys", "expected"), CONFIGS)
def test_keys_become_those_of_config_json(name, keys, expected, tmp_path):
    config = model(tmp_path, name, keys).published.config
    assert {key: config[key] for key in expected} == expected


def test_tables_of_frequencies_belong_to_the_config(tmp_path):
    table = {"rope_freqs.weight": (np.array([1, 1.1, 8], np.float32), "F32")}
    found = model(tmp_path, tensors=table)
    assert found.fields == {"rotary_scaling": {"kind": "divisors", "divisors": [1.0, 1.1, 8.0]}}
    assert list(found.published.tensors) == ["model.embed_tokens.weight"]
    table = {
        f"rope_factors_{n}.weight": (np.array([1.5, i], np.float32), "F32") for i, n in enumerate(("short", "long"))
    }
    for factor in (1.25, 1.0):  # sqrt(1 + ln(128 / 8) / ln 8) is 1.527525
        attention = {"rope.scaling.original_context_length": 8, "rope.scaling.attn_factor": factor * 1.5275252}
        config = model(tmp_path, "phi3", attention, table).published.config
        scaling = {"rope_type": "longrope", "short_factor": [1.5, 0.0], "long_factor": [1.5, 1.0]}
        scaling |= {"attention_factor": 1.9094065} if factor > 1 else {}
        assert config["rope_scaling"] == scaling
        assert config["original_max_position_embeddings"] == 8


@pytest.mark.parametrize(
    ("name", "keys", "expected"),
    [
        ("mamba", {}, "general.architecture is 'mamba'"),
        ("llama", {"expert_count": 8}, "llama.expert_count=8 is not supported"),
        (
            "llama",
            {"attention.head_count": np.array([4, 8], np.int32)},
            "llama.attention.head_count differs between layers",
        ),
        ("llama", {"attention.value_length": 8}, "value_length is 8, but keys have 16"),
        (
            "llama",
            {"embedding_length": None, "block_count": 0},
            "embedding_length is None, not a positive integer; .*block_count is 0",
        ),
        ("llama", {"embedding_length": "wide"}, "embedding_length is 'wide', not a number"),
        ("gemma3", {"attention.sliding_window_pattern": "no"}, "pattern is 'no', neither a period"),
    ],
)
def test_what_is_not_read_is_named(name, keys, expected, tmp_path):
    with pytest.raises(UserError, match=expected):
        model(tmp_path, name, keys)


def test_every_tensor_has_a_place(tmp_path):
    """A name that nobody knows keeps its own, for the family to name."""
    arrays = {f"blk.0.{part}.weight": (np.zeros(4, np.float32), "F32") for part in ("ffn_norm", "attn_sinks")}
    names = [*model(tmp_path, "gemma2", tensors=arrays).published.tensors]
    assert names[1:] == ["model.layers.0.pre_feedforward_layernorm.weight", "blk.0.attn_sinks.weight"]
    assert {each.layers for each in ARCHITECTURES.values()} == {"model.layers", "transformer.h"}


def test_a_vocabulary_of_bytes(text_pairs):
    texts, notes = text_files({**text_pairs, "tokenizer.chat_template": "{{ x }}"}, "x.gguf")
    assert notes == []
    assert texts["chat_template.jinja"] == "{{ x }}"
    assert json.loads(texts["tokenizer_config.json"])["eos_token"] == "<|end|>"
    made = tokenizers.Tokenizer.from_str(texts["tokenizer.json"])
    assert made.encode("hello 12<tool><|end|>").tokens == ["hel", "l", "o", "Ġ", "1", "2", "<tool>", "<|end|>"]
    assert made.encode("e\u0301").tokens == ["Ã", "©"]  # composed, as Qwen's own file says


def test_pieces_with_scores():
    """Of two ways to merge, the piece of the better score; bytes for letters that no piece has."""
    tokens = ["<unk>", "<s>", "▁", "a", "b", "c", "ab", "bc", "▁a", "<0xC3>", "<0xA9>"]
    keys = {"model": "llama", "tokens": tokens, "token_type": np.array([2, 3, *[1] * 7, 6, 6], np.int32)}
    keys |= {"scores": np.array([0, 0, -1, -2, -3, -4, -9, -5, -7, 0, 0], np.float32), "unknown_token_id": 0}
    pairs = {f"tokenizer.ggml.{key}": value for key, value in {**keys, "bos_token_id": 1}.items()}
    made = tokenizers.Tokenizer.from_str(text_files(pairs, "x")[0]["tokenizer.json"])
    assert made.encode("abc é").tokens == ["<s>", "▁a", "bc", "▁", "<0xC3>", "<0xA9>"]
    assert made.decode(made.encode("abc é").ids) == "abc é"
    pairs |= {"tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.add_bos_token": False}
    made = tokenizers.Tokenizer.from_str(text_files(pairs, "x")[0]["tokenizer.json"])
    assert made.encode("abc").tokens == ["a", "bc"]


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"pre": "superbpe"}, "pre is 'superbpe', an unsupported pre-tokenizer"),
        ({"model": "rwkv"}, "model is 'rwkv'; supported: gpt2, llama"),
        ({"tokens": ["a", "a", "b"], "token_type": np.ones(3, np.int32)}, "tokens has a token twice"),
        ({"token_type": np.ones(3, np.int32)}, "token_type has 3 values for 260 tokens"),
        ({"tokens": None}, "tokens is no list of strings"),
        ({"merges": ["h"]}, "merges: 'h' is no pair"),
        ({"merges": ["h zz"]}, "merges: 'h zz' are no tokens"),
        ({"eos_token_id": 260}, "eos_token_id is 260, but there are 260 tokens"),
    ],
)
def test_a_vocabulary_that_is_not_read(changed, expected, text_pairs):
    pairs = text_pairs | {f"tokenizer.ggml.{key}": value for key, value in changed.items()}
    with pytest.raises(UserError, match=expected):
        text_files(pairs, "x.gguf")


@pytest.mark.parametrize("kind", [kind for kind in SPECIAL if kind != "llama2-metaspace"])
def test_a_vocabulary_comes_back(kind):
    """What is written of a maker's tokenizer.json cuts and joins text as that does."""
    made = tokenizers.Tokenizer.from_str(text := makers_json(kind))
    size, start = made.get_vocab_size() + 2, made.token_to_id(START.get(kind, "")) or 0
    sizes, end = {"architecture": "decoder", "encoder_layers": 0, "tie_embeddings": "none", "vocab_size": size}, 5
    keys, notes = text_keys(text, TransformerConfig.from_dict({**sizes, "pad_id": 3, "bos_id": start, "eos_id": end}))
    assert notes == []
    assert keys["tokenizer.ggml.tokens"][-2:] == [f"[PAD{size - 2}]", f"[PAD{size - 1}]"]
    texts, _ = text_files({**keys, "tokenizer.ggml.bos_token_id": start, "tokenizer.ggml.eos_token_id": end}, "x.gguf")
    again = tokenizers.Tokenizer.from_str(texts["tokenizer.json"])
    for line in hard_texts(kind):
        assert (ids := made.encode(line).ids) == again.encode(line).ids, line
        assert made.decode(ids) == again.decode(ids)


@pytest.mark.parametrize("text", [Tokenizer.train(["one two"], 270).to_json(), makers_json("llama2-metaspace")])
def test_a_vocabulary_that_llama_cpp_lacks(text):
    """Ours has its own expression; Metaspace puts no mark before a space, as llama.cpp does."""
    config = TransformerConfig.from_dict({"architecture": "encoder", "decoder_layers": 0, "vocab_size": 300})
    assert text_keys(text, config) == ({"tokenizer.ggml.model": "no_vocab"}, [UNSAID])


GOLDEN = Path(__file__).parent / "golden_decoders"


@pytest.mark.parametrize(
    "name",
    ["gpt2", "llama-biased", "llama3", "llama-linear", "qwen2", "hunyuan", "gemma2-wide", "olmo2-linear", "granite"],
)
def test_a_model_written_and_read_is_the_same(name, tmp_path):
    """llama.cpp computes the same logits of these files; frequencies of Llama 3 are a table there."""
    import_huggingface(GOLDEN / name, tmp_path / "model")
    notes = to_gguf(tmp_path / "model", tmp_path / "x.gguf")
    assert notes == ["no tokenizer (the checkpoint has none)"]
    seen: list[tuple[float, str]] = []
    import_huggingface(tmp_path / "x.gguf", tmp_path / "back", watch=lambda *now: seen.append(now))
    before, after = open_checkpoint(tmp_path / "model"), open_checkpoint(tmp_path / "back")
    assert [share for share, _ in seen] == sorted({share for share, _ in seen})
    assert sorted(name for _, name in seen) == sorted(after.names())
    for parameter, array in before.tensors():
        np.testing.assert_array_equal(after.tensor(parameter), array.astype(np.float32))
    np.testing.assert_allclose(rotary_frequencies(after.config), rotary_frequencies(before.config), rtol=3e-7)


def test_a_file_is_run_as_it_is(tmp_path):
    """By its first bytes, whatever it is called."""
    import_huggingface(GOLDEN / "llama", tmp_path / "model")
    to_gguf(tmp_path / "model", tmp_path / "x.gguf")
    names = ["model", "x.gguf", "sha256-0f1e", "x.bin"]
    for name in names[2:]:
        (tmp_path / name).write_bytes((tmp_path / "x.gguf").read_bytes())
    outputs = [open_folder(tmp_path / name).generate([[5, 6, 7]], max_new_tokens=4) for name in names]
    assert outputs == outputs[:1] * 4


def test_templates_and_ends_come_back(tmp_path):
    """Nothing that a conversation needs is lost; what a file has no key for is told."""
    import_huggingface(GOLDEN / "llama", tmp_path / "llama")
    config = replace(open_checkpoint(tmp_path / "llama").config, vocab_size=384, source_vocab_size=384, eos_id=376)
    settings = {"chat_templates": {"default": "{{ x }}", "tool_use": "{{ y }}"}, "end_ids": (378, 377)}
    text, texts = makers_json("qwen2"), settings_text(settings)
    save_checkpoint(tmp_path / "model", config, random_weights(config, 0), text, texts=texts)
    assert to_gguf(tmp_path / "model", tmp_path / "x.gguf") == []
    import_huggingface(tmp_path / "x.gguf", tmp_path / "back")
    found = read_settings(tmp_path / "back", config)
    assert {name: found[name] for name in settings} == settings
    texts = settings_text({"end_ids": (378, 377, 375), "max_new_tokens": 9})
    save_checkpoint(tmp_path / "model", config, random_weights(config, 0), text, texts=texts, force=True)
    notes = to_gguf(tmp_path / "model", tmp_path / "x.gguf", force=True)
    assert notes == ["generation settings that GGUF can't store: max_new_tokens, end_ids [375]"]
    with pytest.raises(UserError, match=r"model\.bin: name it model\.bin\.gguf; programs know"):
        to_gguf(tmp_path / "model", tmp_path / "model.bin")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("llama-wide", "activation='gelu' becomes 'silu'"),
        ("qwen3-biased", "attention_bias=True becomes False"),
        ("qwen3-yarn", "'truncate': False, .*'attention_factor': 1.3"),
        ("gpt2-unscaled", "attention_scale=1.0 becomes None"),
    ],
)
def test_what_llama_cpp_can_not_say_is_refused(name, expected, tmp_path):
    import_huggingface(GOLDEN / name, tmp_path / "model")
    with pytest.raises(UserError, match=expected):
        to_gguf(tmp_path / "model", tmp_path / "x.gguf")
    assert not (tmp_path / "x.gguf").exists()


def test_matrices_of_other_types(tmp_path):
    """Rows that are no blocks become float16, which is said; what isn't float32 comes back in its own type."""
    import_huggingface(GOLDEN / "qwen2", tmp_path / "model")
    shapes = {name: array.shape for name, array in open_checkpoint(tmp_path / "model").tensors() if array.ndim == 2}
    for kind, bits in (("f16", 0), ("bf16", 0), ("q8_0", 8), ("q4_0", 4)):
        notes = to_gguf(tmp_path / "model", tmp_path / f"{kind}.gguf", kind)
        import_huggingface(tmp_path / f"{kind}.gguf", tmp_path / kind)
        found = open_checkpoint(tmp_path / kind)
        blocks = {name for name, (_, width) in shapes.items() if bits and width % 32 == 0}
        assert {name: scheme.bits for name, scheme in found.quantization.items()} == dict.fromkeys(blocks, bits)
        assert any("are float16" in note for note in notes) == bool(bits and len(blocks) < len(shapes))
        for name in shapes.keys() - blocks:
            wide = open_checkpoint(tmp_path / "model").tensor(name).astype(np.float32)
            narrow = number_type("bfloat16" if kind == "bf16" else "float16")
            np.testing.assert_array_equal(found.tensor(name).astype(np.float32), wide.astype(narrow).astype(np.float32))
    with pytest.raises(UserError, match="type='q6_k': choose one of f32"):
        to_gguf(tmp_path / "model", tmp_path / "x.gguf", "q6_k")


BLOCKS = {"Q4_0": (18, 32, 0), "Q4_1": (20, 32, 0, 2), "Q5_0": (22, 32, 0), "Q8_0": (34, 32, 0)}
BLOCKS |= {"Q2_K": (84, 256, 80, 82), "Q3_K": (110, 256, 108), "Q4_K": (144, 256, 0, 2), "Q5_K": (176, 256, 0, 2)}
BLOCKS |= {"Q6_K": (210, 256, 208)}
"""{type: bytes and weights of a block, and where its halves are}"""
MATRICES = {"blk.0.attn_q": "Q4_0", "blk.0.attn_k": "Q6_K", "blk.0.attn_v": "Q4_K", "blk.0.attn_output": "Q5_0"}
MATRICES |= {"blk.0.ffn_gate": "Q2_K", "blk.0.ffn_up": "Q3_K", "blk.0.ffn_down": "Q5_K", "token_embd": "Q8_0"}
MATRICES |= {"output": "Q4_1"}


def blocks(kind: str, rows: int, width: int, seed: int) -> Stored:
    """Random blocks of a type, of small numbers."""
    size, weights, *halves = BLOCKS[kind]
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 256, (rows * width // weights, size)).astype(np.uint8)
    for at in halves:
        data[:, at : at + 2] = rng.uniform(1e-4, 4e-4, (len(data), 1)).astype(np.float16).view(np.uint8)
    return Stored((rows, width), np.dtype(np.uint8), lambda: data.reshape(-1))


def test_the_file_s_own_integers_are_exported_and_proven(tmp_path, monkeypatch):
    """Groups of 16 and of 32, with and without a bias: in graphs as they are, and one bit of one of them is told."""
    ours = gguf_files._data
    monkeypatch.setattr(gguf_files, "_data", lambda x, kind: x if x.dtype == np.uint8 else ours(x, kind))
    rows = {"blk.0.attn_k": 128, "blk.0.attn_v": 128, "token_embd": 40, "output": 40}
    tensors: dict = {
        f"{name}.weight": (blocks(kind, rows.get(name, 256), 256, i), kind)
        for i, (name, kind) in enumerate(MATRICES.items())
    }
    norms = ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm")
    tensors |= {f"{name}.weight": (np.ones(256, np.float32), "F32") for name in norms}
    sizes = dict(embedding_length=256, block_count=1, feed_forward_length=256, context_length=16)
    path = write(tmp_path, "llama", sizes, tensors, {**WORDS, "general.name": "m"})
    import_huggingface(path, tmp_path / "model")
    opened = open_checkpoint(tmp_path / "model")
    assert {scheme.group_size for scheme in opened.quantization.values()} == {16, 32}
    assert len(opened.quantization) == len(MATRICES)
    export_onnx(opened.folder, tmp_path / "onnx", precision=["float32", "packed"])
    runtimes = ["mlx", "onnxruntime", "onnxruntime:cpu:all:packed"]
    report = compare(opened.folder, tmp_path / "onnx", runtimes, 3, threads=1, longest=6, searches=False)
    assert report.equal, report.failures()
    for name in ("model", "model_packed"):
        file = tmp_path / "onnx" / "onnx" / f"{name}.onnx"
        graph = onnx.load(file)
        key = next(x for x in graph.graph.initializer if "0.self_attention.key_proj" in x.name and x.data_type == UINT8)
        key.raw_data = key.raw_data[:-1] + bytes([key.raw_data[-1] ^ 1])
        onnx.save(graph, file)
    for precision in ("float32", "packed"):
        runtime = f"onnxruntime:cpu:all:{precision}"
        report = compare(opened.folder, tmp_path / "onnx", [runtime], 3, threads=1, longest=2, searches=False)
        problems = [problem for check in report.weights for problem in check.problems]
        assert {problem.split(":")[0] for problem in problems} == {"decoder.layers.0.self_attention.key_proj.weight"}


def test_a_gguf_file_is_a_place(tmp_path, text_pairs):
    with pytest.raises(UserError, match=r"is a GGUF model, and here a checkpoint is needed; make one of it: .* import"):
        open_checkpoint(write(tmp_path))
    for read in (open_checkpoint, read_published):
        with pytest.raises(UserError, match=r"a folder of GGUF files; name one of them: .*x\.gguf"):
            read(tmp_path)
    table = {"rope_freqs.weight": (np.ones(8, np.float32), "F32")}
    with pytest.raises(UserError, match=r"x\.gguf: weights don't fit config.json: 19, .* missing model\.layers"):
        read_published(write(tmp_path, tensors=table, text=text_pairs))
