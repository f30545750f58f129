"""`make graph-bytes`: one changed constant is found and named, no model that isn't exported passes, and all choices are
among those that are."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import onnx
import pytest
from covering_exports import DRAWS, FIELDS, HOW, Export, accepted, factors
from differing_files import differences
from imports import ROOT
from options import OPTIONS, covering
from rich.progress import Progress
from small_models import write_text_model

from export import export_onnx, export_search
from export.precision.table import PRECISIONS
from export.settings import ExportSettings, TargetName

MODULE = importlib.util.spec_from_file_location("graph_bytes", ROOT / "tests" / "graph_bytes.py")
graph_bytes = importlib.util.module_from_spec(MODULE)
MODULE.loader.exec_module(graph_bytes)

KNOWN = {name: list(OPTIONS.get(name, ())) for name in FIELDS}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """PLACE/package, PLACE/search and PLACE/refused.failed, as two processes with the code of this tree write them."""
    folder = tmp_path_factory.mktemp("graph-bytes")
    write_text_model(folder)
    with Progress(disable=True) as progress:
        graph_bytes.export_all(ROOT, folder / "place", exports(folder), 2, progress, "base")
    return folder / "place"


def exports(folder: Path) -> list[Export]:
    model = str(folder / "model")
    return [
        Export("package", "export_onnx", model, "onnx", {"precision": ["float32", "int8"]}),
        Export("search", "export_search", model, "search.onnx", {"external": True}),
        Export("refused", "export_onnx", model, "onnx", {"target": "gpu"}),
    ]


@pytest.mark.slow
def test_equal_files_are_equal_and_what_no_revision_exports_is_told(base: Path, tmp_path: Path) -> None:
    shutil.copytree(base, tmp_path / "tree")
    package, search, refused = (
        graph_bytes.compared(export, base, tmp_path / "tree") for export in exports(base.parent)
    )
    assert (package, search) == ([], [])
    assert len(refused) == 3
    assert all("UserError: target 'gpu': choose one of" in line for line in refused[1:])
    never = Export("never", "export_onnx", "", "onnx", {})
    assert "nothing was written" in graph_bytes.compared(never, base, base)[1]


def flip(file: Path, place: int) -> None:
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)


def edited(change: Callable[[onnx.GraphProto], object]) -> Callable[[Path], None]:
    def edit(file: Path) -> None:
        model = onnx.load(file, load_external_data=False)
        change(model.graph)
        file.write_bytes(model.SerializeToString(deterministic=True))

    return edit


def change_constant(graph: onnx.GraphProto) -> None:
    tensor = next(t for t in graph.initializer if t.name == "const_-1000000000.0_f32")
    tensor.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(tensor) * 2, tensor.name))


def change_branch(graph: onnx.GraphProto) -> None:
    branches = next(node for node in graph.node if node.op_type == "If").attribute
    branches[0].g.node[-1].op_type = "Neg"


CHANGES: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "weight": ("model.onnx_data", lambda file: flip(file, 1000), "the first other at 1000"),
    "constant": (
        "encoder_model.onnx",
        edited(change_constant),
        "(const_-1000000000.0_f32): 1 of 1 values differ, the first at []: -1000000000.0 before, -2000000000.0 now",
    ),
    "branch": ("decoder_model_merged.onnx", edited(change_branch), "(else_branch) g node"),
    "json": ("manifest.json", lambda file: file.write_text(file.read_text().replace("1", "2", 1)), "line "),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CHANGES)
def test_one_change_is_one_line(name: str, base: Path, tmp_path: Path) -> None:
    file, change, said = CHANGES[name]
    shutil.copytree(base / "package", tmp_path / "package")
    change(tmp_path / "package" / "onnx" / "onnx" / file)
    [line] = differences(base / "package", tmp_path / "package")
    assert line.startswith(f"onnx/onnx/{file}: ")
    assert said in line


@pytest.mark.slow
def test_every_choice_is_exported_in_several_models() -> None:
    chosen = factors(KNOWN)
    models = covering(chosen, accepted, draws=DRAWS)
    for place, (factor, values) in enumerate(chosen.items()):
        counts = [sum(model[place] == i for model in models) for i in range(len(values))]
        assert min(counts) >= 3, (factor, counts)
    assert OPTIONS.keys() <= {name for values in chosen.values() for each in values for name in each}


OF_FILES = {"gate_source", "gate_reference", "accept_loss", "shortlist", "dimensions", "least_neighbours"}
OF_ENCODERS = {"float32_layers"}
"""Arguments about files that a caller gives, or about an embedding.json, which these models lack; and what encoders
alone take."""


def test_targets_precisions_and_arguments_are_all_among_the_choices() -> None:
    values = [item for choices in HOW.values() for choice in choices for item in choice.items()]
    assert {value for name, value in values if name == "target"} == set(get_args(TargetName))
    assert {value for name, value in values if name == "precision" and isinstance(value, str)} == set(PRECISIONS)
    arguments = {*inspect.signature(export_onnx).parameters, *inspect.signature(export_search).parameters}
    arguments |= {field.name for field in dataclasses.fields(ExportSettings)}
    without_effect = {"checkpoint", "out", "force", "log", "watch", "settings", "changes"}
    assert arguments - without_effect <= {name for name, _ in values} | OF_FILES | OF_ENCODERS
