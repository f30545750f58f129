"""The table of targets holds all facts: nothing else asks for a target by its name, and nobody gets another's graphs
without being told."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
from imports import modules
from small_models import alone, encoder_decoder, random_weights

from export import OnnxTransformer, export_onnx, export_search
from export.targets import table as targets_table
from export.targets.table import TARGETS, target_of
from mlx_transformer.core.checkpoint import save_checkpoint
from mlx_transformer.system.errors import UserError

README = Path(targets_table.__file__).with_name("README.md")
ASKED = re.compile(r"""\btarget(\.name)?\s*(==|!=|(not\s+)?in\b)\s*[("'\[{]""")


def test_no_target_is_asked_for_by_its_name():
    assert ASKED.search('if target == "cpu"')
    assert ASKED.search('target not in ("a", "b")')
    for name, path in modules().items():
        if name != "export.targets.table":
            assert not ASKED.search(path.read_text(encoding="utf-8")), name


def test_graphs_of_another_target_are_told_and_recorded(tmp_path):
    config, lines = dataclasses.replace(alone("paper", "decoder"), positions="relative"), []
    checkpoint = save_checkpoint(tmp_path / "model", config, random_weights(config))
    folder = export_onnx(checkpoint, tmp_path / "onnx", target="cpu", log=lines.append)
    reason = target_of("cpu").supports(config)
    assert lines == [f"model.onnx: written as target portable has it: {reason}"]
    assert reason == (
        "target cpu has no graphs of its own for decoders alone with positions='relative', which its attention lacks"
    )
    recorded = json.loads((folder / "mlx_transformer.json").read_text(encoding="utf-8"))
    assert recorded["target"] == "cpu"
    assert recorded["graphs"] == {"target": "portable", "why": reason}
    assert OnnxTransformer(folder, threads=1).sessions.keys() == {"model"}


@pytest.mark.parametrize("target", ["portable", "cpu", "web", "cuda"])
def test_graphs_of_its_own_need_no_word(target, tmp_path):
    config, lines = encoder_decoder("paper"), []
    assert target_of(target).supports(config) is None
    folder = export_onnx(
        save_checkpoint(tmp_path / "model", config, random_weights(config)),
        tmp_path / "onnx",
        target=target,
        log=lines.append,
    )
    assert lines == []
    assert "graphs" not in json.loads((folder / "mlx_transformer.json").read_text(encoding="utf-8"))


def test_a_target_with_nothing_in_its_place_refuses():
    bare = dataclasses.replace(target_of("cpu"), otherwise=None)
    relative = dataclasses.replace(alone("paper", "decoder"), positions="relative")
    with pytest.raises(UserError, match="positions='relative', which its attention lacks: choose another target"):
        bare.graph_names(relative)


def test_the_search_names_the_targets_that_have_one(tmp_path):
    without = [name for name, target in TARGETS.items() if not target.search]
    assert without == ["web", "cuda"]
    for name in without:
        with pytest.raises(UserError, match=f"target '{name}' has none; choose one of portable, cpu$"):
            export_search(tmp_path / "model", tmp_path / "out.onnx", target=name)


def test_every_graph_of_a_row_has_a_data_file():
    configs = [encoder_decoder("paper"), alone("paper", "encoder"), alone("paper", "decoder")]
    for target in TARGETS.values():
        assert target.otherwise is None or target.otherwise in TARGETS
        for config in configs:
            owned = [name for names in target.data_files(config).values() for name in names]
            assert owned == target.graph_names(config)


def test_every_operator_choice_has_a_reason():
    """In the README: `portable` is what the others differ from."""
    _, _, text = README.read_text(encoding="utf-8").partition("## Why these operators\n")
    parts = re.split(r"^### `(\w+)`$", text.partition("\n## ")[0], flags=re.MULTILINE)[1:]
    row = re.compile(r"^\| (.+) \| (.+) \| (.+) \|$", re.MULTILINE)
    rows = {name: row.findall(part)[1:] for name, part in zip(parts[::2], parts[1::2], strict=True)}
    assert rows.keys() == TARGETS.keys() - {"portable"}
    for target, choices in rows.items():
        assert choices, target
        for used, instead_of, why in choices:
            assert used != instead_of
            assert len(why) > 20, used
