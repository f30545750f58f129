"""Decoders alone in target cpu: the same logits and tokens as portable's, alone and beside texts of any lengths that
join and leave, at every cut of a prompt."""

from __future__ import annotations

import io
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from combined import thinned
from rich.console import Console
from small_models import DECODER, SIZES, random_weights

from export import OnnxTransformer, export_onnx
from export.package import write
from export.package.plan import describe_graphs
from export.settings import ExportSettings
from export.targets.cpu import texts as runtime
from export.targets.cpu.decoder import join_projections
from export.validate import compare
from mlx_transformer.commands.info import describe
from mlx_transformer.core.checkpoint import save_checkpoint
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.system.errors import UserError

WIDE: dict[str, Any] = dict(d_model=64, heads=4, key_value_heads=2, d_k=16, d_v=16, positions="rotary", norm="rmsnorm")
WIDE |= dict(norm_placement="pre", gated=True, activation="silu", vocab_size=90)
MODELS: dict[str, dict[str, Any]] = {
    "turned inside": WIDE,
    "windows, two bases": {**WIDE, "layer_pattern": [{"window": 5}, {"rotary_base": 100.0}], "score_cap": 2.0},
    "a part turned, no position": {**WIDE, "rotary_width": 8, "layer_pattern": [{}, {"positions": "none"}]},
    "norms of heads": {**WIDE, "query_key_norm": True, "layer_pattern": [{}, {"query_key_norm_place": "after"}]},
    "norm of all heads": {**WIDE, "query_key_norm": True, "query_key_norm_place": "width", "norm_placement": "after"},
    "learned": dict(positions="learned", attention_bias=True, tie_embeddings="none", output_bias=True),
    "padded heads": dict(d_k=6, d_v=10, key_value_heads=1, positions="rotary", attention_scale=0.3),
}
OPTIONS: list[dict[str, Any]] = [{}, {"beam": 3}, {"sample": True, "seed": 4}, {"min_new_tokens": 8}]
OPTIONS += [{"no_repeat_ngram": 2}]
PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15], [20], [31, 32, 33], [40, 41, 42, 43, 44, 45]]


def written(folder: Path, changes: dict[str, Any]) -> tuple[Path, Path]:
    config = TransformerConfig(**{**SIZES, **DECODER, **changes})
    checkpoint = save_checkpoint(folder / "model", config, random_weights(config))
    return checkpoint, export_onnx(checkpoint, folder / "cpu", target="cpu")


def logits_of(graphs: Any, tokens: list[int]) -> np.ndarray:
    texts = graphs.texts()
    texts.add()
    return texts.logits(tokens)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> OnnxTransformer:
    _, folder = written(tmp_path_factory.mktemp("decoder"), MODELS["windows, two bases"])
    return OnnxTransformer(folder, threads=1)


@pytest.mark.fast("turned inside")
@pytest.mark.parametrize("name", thinned(MODELS, 3))
def test_every_kind_of_attention(name: str, tmp_path: Path) -> None:
    checkpoint, cpu = written(tmp_path, MODELS[name])
    report = compare(checkpoint, cpu, ["onnxruntime"], seed=3, threads=1)
    assert report.equal, report.failures()
    assert "side by side" in {point.path for point in report.points}
    model, portable = (OnnxTransformer(f, threads=1) for f in (cpu, export_onnx(checkpoint, tmp_path / "portable")))
    assert model.sessions.keys() == {"step_cpu"}
    choices: list[dict[str, Any]] = [
        {},
        {"beam": 3},
        {"sample": True, "seed": 4},
        {"min_new_tokens": 8},
        {"no_repeat_ngram": 2},
    ]
    for options in choices:
        made = [each.generate(PROMPTS, max_new_tokens=12, **options) for each in (model, portable)]
        assert made[0] == made[1], options


@pytest.mark.parametrize("precision", ["float32", "int8", "int4"])
@pytest.mark.parametrize(
    ("name", "joined"), [("turned inside", 2), ("a part turned, no position", 1), ("norms of heads", 0)]
)
def test_one_product_makes_queries_keys_and_values(precision: str, name: str, joined: int, tmp_path: Path) -> None:
    """Where nothing is between the products and the attention. With a bias, and in any precision."""
    config = TransformerConfig(**{**SIZES, **DECODER, **MODELS[name], "attention_bias": True})
    checkpoint = save_checkpoint(tmp_path / "model", config, random_weights(config))
    folder = export_onnx(checkpoint, tmp_path / "cpu", target="cpu", precision=precision, accept_loss=True)
    for file in (folder / "onnx").glob("*_cpu*.onnx"):
        graph = onnx.load(file, load_external_data=False).graph
        attentions = [node for node in graph.node if node.op_type == "GroupQueryAttention"]
        together = [node for node in attentions if not node.input[1]]
        assert (len(attentions), len(together)) == (2, joined), file
    assert compare(checkpoint, folder, ["onnxruntime"], seed=3, threads=1).equal


def test_products_of_other_blocks_stay_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """E.g. where a checkpoint's keys have more bits than its queries."""
    monkeypatch.setattr(write, "join_projections", lambda model: None)
    checkpoint, _ = written(tmp_path, MODELS["turned inside"])
    graph = write.package_graphs(write.Plan.of(checkpoint, ExportSettings(target="cpu", precision=["int4"])), "int4")
    model = next(models["step_cpu"] for models in graph.values())
    keys = next(node for node in model.graph if "/layers.0/self_attention/key_proj/" in str(node.name))
    assert keys.op_type == "MatMulNBits"
    keys.attributes["block_size"] = ir.AttrInt64("block_size", 64)
    join_projections(model)
    together = [node.inputs[1] is None for node in model.graph if node.op_type == "GroupQueryAttention"]
    assert together == [False, True]


def test_texts_join_leave_and_are_cut(model: OnnxTransformer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the neighbours, a text's logits are its own; and memory that no text wrote is never read."""
    empty = np.empty
    monkeypatch.setattr(runtime.np, "empty", lambda shape, dtype=np.float32: np.full_like(empty(shape, dtype), -1e30))
    graphs = model.graphs

    running = graphs.texts()
    expected: list[list[int]] = []

    def step(*tokens: int) -> None:
        logits = running.step(tokens)
        for text, token, values in zip(expected, tokens, logits, strict=True):
            text.append(token)
            np.testing.assert_allclose(values, logits_of(graphs, text)[-1], rtol=1e-4, atol=1e-5)
        assert running.ids == expected

    for prompt in PROMPTS[:2]:
        running.add(prompt)
        expected.append([*prompt])
    step(1, 2)
    other = graphs.texts()
    other.add(PROMPTS[2])
    other.read([50, 51])
    other.add(PROMPTS[3])
    assert running.join(other) == 2
    assert (len(other), other.ids) == (0, [])
    expected += [[*PROMPTS[2], 50, 51], [*PROMPTS[3]]]
    step(3, 4, 5, 6)
    running.leave(1)
    expected[1] = expected.pop()
    step(7, 8, 9)
    prefix = running.take(0, 5)
    running.cut(2, 2)
    del expected[2][2:]
    step(10, 11, 12)
    assert running.join(prefix) == 3
    expected.append(expected[0][:5])
    for token in range(20):  # beyond the window, and beyond the room of the first buffers
        step(token, token + 1, token + 2, token + 3)
    for _ in range(4):
        running.leave(0)
    assert (len(running), running.longest) == (0, 0)


def test_layers_with_windows_hold_no_more_than_their_window(
    model: OnnxTransformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The window is 5: their buffers have 4 + 2 chunks of 3 places, however long a text is; logits stay the same."""
    graphs, length = model.graphs, model.config.max_positions
    tokens = [[3 + (7 + 2 * row) * i % 80 for i in range(length)] for row in range(3)]
    whole = [logits_of(graphs, each) for each in tokens]
    monkeypatch.setattr(runtime, "CHUNK", 3)
    running, begun = graphs.texts(), [20, 2, 11]
    for row, count in enumerate(begun):
        text = graphs.texts()
        text.add(tokens[row][:count])
        running.join(text)

    def step(rows: list[int]) -> None:
        at = running.lengths.tolist()
        steps = running.step([tokens[row][i] for row, i in zip(rows, at, strict=True)])
        for row, i, logits in zip(rows, at, steps, strict=True):
            np.testing.assert_allclose(logits, whole[row][i], rtol=1e-4, atol=1e-5)

    for _ in range(9):
        step([0, 1, 2])
    assert {x.shape[2] for x in running.buffers[:2]} == {10}
    assert running.buffers[2].shape[2] >= running.longest
    running.cut(0, 28)
    assert running.has(0, 26)
    assert not running.has(0, 20)
    running.select(np.array([0, 0, 2]))
    for _ in range(4):
        step([0, 0, 2])
    part = running.take(2, 22)
    running.leave(0)
    step([2, 0])
    assert running.join(part) == 2
    step([2, 0, 2])
    running.cut(1, 3)
    assert (running.lengths[1], running.ids[1]) == (0, [])
    running.read(tokens[1][:15], 1)
    for _ in range(3):
        step([2, 1, 2])
    beams, begin, written = graphs.texts(), tokens[0][:25], [[5, 6, 7, 8, 9, 10], [9, 4, 3, 8, 8, 6]]
    beams.add(begin)
    beams.select(np.array([0, 0]))
    for at in range(5):
        beams.step([row[at] for row in written])
    beams.select(np.array([1, 1]), len(begin))
    expected = logits_of(graphs, [*begin, *written[1]])[-1]
    for logits in beams.step(written[1][5:] * 2):
        np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-5)


def test_every_cut_of_a_prompt(model: OnnxTransformer, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = [3 + 7 * i % 80 for i in range(30)]
    whole = logits_of(model.graphs, tokens)
    for chunk in (1, 2, 7, 29):
        monkeypatch.setattr(runtime, "CHUNK", chunk)
        texts = model.graphs.texts()
        texts.add(tokens[:-1])
        np.testing.assert_allclose(texts.step([tokens[-1]])[0], whole[-1], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(logits_of(model.graphs, tokens), whole, rtol=1e-4, atol=1e-5)


def test_step_by_step_as_portable(model: OnnxTransformer) -> None:
    """`OnnxTransformer.start` and `step`: padding at the left, then one or several tokens of each row."""
    ids, mask = np.array([[0, 0, 5, 6], [7, 8, 9, 10]]), np.array([[0, 0, 1, 1], [1, 1, 1, 1]])
    cache = model.start(mask=mask)
    logits = [model.step(ids, cache), model.step([[11], [12]], cache), model.step([[13, 14], [15, 16]], cache)]
    for row, tokens in enumerate([[5, 6, 11, 13, 14], [7, 8, 9, 10, 12, 15, 16]]):
        parts = np.concatenate([part[row] for part in logits])[-len(tokens) :]
        np.testing.assert_allclose(parts, logits_of(model.graphs, tokens), rtol=1e-4, atol=1e-5)


def test_a_conversation_goes_on_where_it_was(model: OnnxTransformer, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the last search of a single prompt has read or written isn't read again; the tokens are the same."""
    read: list[int] = []
    of_texts = runtime.Texts.read
    monkeypatch.setattr(runtime, "CHUNK", 4)
    monkeypatch.setattr(runtime.Texts, "read", lambda t, ids, *row: (read.append(len(ids)), of_texts(t, ids, *row))[1])
    graphs = model.graphs
    first = [3 + 5 * i % 80 for i in range(9)]
    for exact, counts in ((True, [8, 2, 2]), (False, [8, 6, 8])):
        graphs._kept.clear()
        monkeypatch.setattr(graphs, "exact", exact)
        read.clear()
        turns = [[*first]]
        for _ in range(3):
            (answer,) = model.generate([turns[-1]], max_new_tokens=4, min_new_tokens=4)
            turns.append([*turns[-1], *answer, 60, 61])
        assert [n for n in read if n] == counts, exact
        graphs._kept.clear()
        assert model.generate(turns[:3], max_new_tokens=4, min_new_tokens=4) == [
            turn[len(before) : -2] for before, turn in pairwise(turns)
        ]


def test_integers(tmp_path: Path) -> None:
    """int8 in one graph; int4's prompts in int8, in a graph of their own that shares the table; `info` says so."""
    checkpoint, _ = written(tmp_path, MODELS["turned inside"])
    folder = export_onnx(checkpoint, tmp_path / "both", target="cpu", precision=["int8", "int4"], accept_loss=True)
    graphs = {name: set(OnnxTransformer(folder, threads=1, precision=name).sessions) for name in ("int8", "int4")}
    assert graphs == {"int8": {"step_cpu"}, "int4": {"step_cpu", "prompt_cpu"}}
    report = compare(
        checkpoint, folder, [f"onnxruntime:cpu:all:{name}" for name in graphs], seed=3, threads=1, searches=False
    )
    assert report.equal, report.failures()
    (folder / "onnx" / "prompt_cpu_q4.onnx").rename(tmp_path / "away.onnx")
    with pytest.raises(UserError, match=r"prompt_cpu_q4.onnx missing; export the model again"):
        OnnxTransformer(folder, precision="int4")
    (tmp_path / "away.onnx").rename(folder / "onnx" / "prompt_cpu_q4.onnx")
    out = io.StringIO()
    Console(file=out, width=200).print(describe(folder, describe_graphs))
    assert "int8, int4; int4's prompts in int8; on this processor " in out.getvalue()
