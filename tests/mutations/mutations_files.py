"""Edits of the files around the graphs of a package, its manifests made to fit: the file and the key have to be
named."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
from small_packages import write_package

from export.runtime.folder import precisions
from export.validate import Report, compare
from mlx_transformer.system.manifest import write_manifest


@dataclass(frozen=True)
class FileMutation:
    """Of `package`, one of `small_packages`, an edit of `file`: of JSON a function of its values, of others of its
    bytes. `says`: how what is said of it goes on after the file's name. `file` is "" for one that has the search
    inside, whose metadata `key` is edited."""

    package: str
    file: str
    edit: Callable[[Any], Any]
    says: str
    key: str = ""

    runtime = "files"


def put(*path: Any, value: Any) -> Callable[[Any], Any]:
    """Another value in that place."""

    def edit(values: Any) -> Any:
        inner = values
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = value
        return values

    return edit


def pieces_exchanged(values: Any) -> Any:
    """Two tokens exchange their ids."""
    vocabulary = values["model"]["vocab"]
    first, second = list(vocabulary)[20:22]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    return values


def last_byte(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


FILES = {
    "vectors that aren't of length 1": FileMutation(
        "vectors, cut", "embedding.json", put("normalize", value=False), "normalize is false"
    ),
    "another pooling": FileMutation(
        "vectors, cut", "embedding.json", put("pooling", value=["mean", "cls"]), 'pooling[0] is "mean"'
    ),
    "another pooling for sentence-transformers": FileMutation(
        "vectors, cut", "1_Pooling/config.json", put("pooling_mode_max_tokens", value=True), "pooling_mode_max_tokens"
    ),
    "another prompt": FileMutation(
        "vectors, cut", "embedding.json", put("prompts", "query", value="Q: "), 'prompts.query is "Q: "'
    ),
    "texts cut earlier": FileMutation(
        "vectors, cut", "sentence_bert_config.json", put("max_seq_length", value=8), "max_seq_length is 8"
    ),
    "a bit of a dense layer": FileMutation(
        "vectors, cut", "2_Dense/model.safetensors", last_byte, "isn't what the checkpoint gives"
    ),
    "two tokens exchanged": FileMutation("encoder-decoder", "tokenizer.json", pieces_exchanged, "model.vocab"),
    "another end token for other runtimes": FileMutation(
        "encoder-decoder", "generation_config.json", put("eos_token_id", value=3), "eos_token_id"
    ),
    "another start token for other runtimes": FileMutation(
        "encoder-decoder", "config.json", put("decoder_start_token_id", value=0), "decoder_start_token_id is 0"
    ),
    "another beam": FileMutation("encoder-decoder", "generation.json", put("beam", value=4), "beam is 4"),
    "fewer positions": FileMutation(
        "encoder-decoder", "mlx_transformer.json", put("config", "max_positions", value=39), "config.max_positions is"
    ),
    "a text cut on the left": FileMutation(
        "encoder-decoder", "tokenizer_config.json", put("padding_side", value="left"), 'padding_side is "left"'
    ),
    "two languages exchanged": FileMutation(
        "languages, on the web", "generation.json", put("languages", "de", value=9), "languages.de is 9"
    ),
    "data files announced that aren't there": FileMutation(
        "languages, on the web", "config.json", put("transformers.js_config", "use_external_data_format", value={}),
        'transformers.js_config"].use_external_data_format',
    ),
    "a longer context for genai": FileMutation(
        "decoder", "genai_config.json", put("model", "context_length", value=41), "model.context_length is 41"
    ),
    "two classes exchanged": FileMutation(
        "classes", "config.json", lambda values: {**values, "id2label": dict(zip(values["id2label"],
        reversed(values["id2label"].values()), strict=True))}, "id2label",
    ),
    "a scale of an imported student": FileMutation(
        "an imported student", "int8_scales.json", put("origin", value={}), "origin"
    ),
    "a candidate of a shortlist": FileMutation(
        "an imported student", "lex.50.50.test.s2t.bin", last_byte, "isn't what"),
    "a candidate of a given shortlist": FileMutation("a given shortlist", "shortlist.bin", last_byte, "damaged"),
    "another limit in one file": FileMutation(
        "one file", "", put("max_new_tokens", value=21), "mlx_transformer.generation: max_new_tokens is 21",
        "mlx_transformer.generation",
    ),
    "a candidate beside one file": FileMutation(
        "one file of a student", "m.lex.50.50.test.s2t.bin", last_byte, "isn't what"
    ),
}  # fmt: skip


def run_file(mutation: FileMutation, place: Path) -> Report:
    """Write the package into an empty folder, edit it and compare."""
    checkpoint, path = write_package(mutation.package, place)
    if mutation.key:
        model = onnx.load(path, load_external_data=False)
        entry = next(each for each in model.metadata_props if each.key == mutation.key)
        entry.value = json.dumps(mutation.edit(json.loads(entry.value)))
        path.write_bytes(model.SerializeToString())
    else:
        file = (path if path.is_dir() else path.parent) / mutation.file
        data = file.read_bytes()
        edited = mutation.edit(json.loads(data) if file.suffix == ".json" else data)
        file.write_bytes(edited if isinstance(edited, bytes) else json.dumps(edited).encode())
        if path.is_dir():
            write_manifest(path)
    held = precisions(path / "onnx") if path.is_dir() else []
    runtime = f"onnxruntime:cpu:all:{held[0]}" if len(held) > 1 and "float32" not in held else "onnxruntime"
    return compare(checkpoint, path, [runtime], 11, threads=1, longest=8, searches=False)


def problem_of(mutation: FileMutation, report: Report) -> str:
    """What the report says of the file; empty where it says nothing of it, or another thing."""
    begin = f"{mutation.file or 'm.onnx'}: "
    problems = () if report.files is None else report.files.problems
    return next((p for p in problems if p.startswith(begin) and mutation.says in p), "")
