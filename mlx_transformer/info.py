"""What `mlx-transformer info` prints about a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from .spec.checkpoint import open_checkpoint, verify_files
from .spec.config import TransformerConfig
from .spec.errors import UserError
from .spec.folders import SPEC, is_onnx_folder
from .spec.parameters import parameter_count


def describe(path: Path) -> RenderableType:
    """Tables about a checkpoint, a run's folder or an ONNX folder; `UserError` if it is none of these or damaged."""
    return _onnx(path) if is_onnx_folder(path) else _checkpoint(path)


def _checkpoint(path: Path) -> RenderableType:
    opened = open_checkpoint(path)
    facts = {"kind": "checkpoint", "folder": str(opened.folder), "tensors": str(len(opened.names()))}
    facts["digests"] = "verified" if (opened.folder / "manifest.json").exists() else "no manifest to verify"
    run = path / "run.json"
    if run.is_file():
        facts |= _run(run)
    return Group(_table(facts), _config(opened.config), _files(opened.folder))


def _run(path: Path) -> dict[str, str]:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        data = ", ".join(f"{name} {part['pairs']:,} pairs" for name, part in record["data"].items())
        return {"run": str(path.parent), "data": data, "trained on": record["device"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: damaged ({error})") from error


def _onnx(path: Path) -> RenderableType:
    verify_files(path)
    facts = {"kind": "ONNX models", "folder": str(path)}
    spec = path / SPEC
    config = None
    if spec.is_file():
        try:
            values: dict[str, Any] = json.loads(spec.read_text(encoding="utf-8"))
            config = TransformerConfig.from_dict(values.get("config", values))
        except (OSError, ValueError) as error:
            raise UserError(f"{spec}: damaged ({error})") from error
    parts: list[RenderableType] = [_table(facts), *([_config(config)] if config else []), _files(path)]
    return Group(*parts, *_graphs(path))


def _graphs(path: Path) -> list[RenderableType]:
    from export.inspect import graph_facts

    tables: list[RenderableType] = []
    for name, facts in graph_facts(path).items():
        table = Table(title=f"{name}: {facts['nodes']} nodes, opset {facts['opset']}", title_justify="left")
        for column in ("", "name", "type", "shape"):
            table.add_column(column)
        for kind in ("inputs", "outputs"):
            for value in facts[kind]:
                table.add_row(kind[:-1], *value)
        tables.append(table)
    return tables


def _config(config: TransformerConfig) -> Table:
    values = {name: str(value) for name, value in config.to_dict().items()}
    return _table({"parameters": f"{parameter_count(config):,}", **values}, "config")


def _files(folder: Path) -> Table:
    files = {p: p.stat().st_size for p in sorted(folder.rglob("*")) if p.is_file()}
    return _table({str(p.relative_to(folder)): f"{size:,} bytes" for p, size in files.items()}, "files")


def _table(facts: dict[str, str], title: str | None = None) -> Table:
    table = Table(title=title, title_justify="left", show_header=False)
    for name, value in facts.items():
        table.add_row(name, value)
    return table
