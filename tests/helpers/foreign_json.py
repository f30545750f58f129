"""JSON of others with one value of another type: every node of a file in turn; and a folder of sentence-transformers
with every file that has some."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

VALUES: tuple[Any, ...] = (
    *(None, 3, -1, 0, 2.5, True, False, float("nan"), float("inf"), 10**400, "x", "", "\ud800", "a\nb", "y" * 9999),
    *([], {}, [["cls"]], [None], ["x"], [3, "x"], {"x": 3}, {"0": {}}, [[[[[[3]]]]]], {"a": {"a": {"a": {}}}}),
)
LATER = ((2, "Dense"), (3, "Normalize"))
BGE = Path(__file__).parents[1] / "mlx_transformer" / "families" / "golden_bge"
MOST_ENTRIES = {dict: 60, list: 12}
"""Of a longer one, such as a vocabulary, the first and the last are changed."""


def nodes(value: Any) -> Iterator[tuple[Any, ...]]:
    """The way to each value inside another one, the whole first."""
    yield ()
    keys: list[Any] = [*value] if isinstance(value, dict) else [*range(len(value))] if isinstance(value, list) else []
    for key in () if not keys else keys if len(keys) <= MOST_ENTRIES[type(value)] else (keys[0], keys[-1]):
        yield from ((key, *rest) for rest in nodes(value[key]))


def replaced(value: Any, way: tuple[Any, ...], new: Any) -> Any:
    if not way:
        return new
    key, *rest = way
    inner = replaced(value[key], tuple(rest), new)
    if isinstance(value, dict):
        return {**value, key: inner}
    return [*value[:key], inner, *value[key + 1 :]]


def linked(source: Path, folder: Path) -> Path:
    """The same folder, of links, of which one can become another file."""
    for file in source.rglob("*"):
        if file.is_file() and file.name not in ("texts.json", "answers.npz"):  # ours, beside theirs
            place = folder / file.relative_to(source)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.symlink_to(file.resolve())
    return folder


def write(file: Path, values: Any) -> None:
    file.unlink(missing_ok=True)
    file.write_bytes(text_of(values))


def text_of(values: Any) -> bytes:
    """JSON, with the numbers that Python doesn't write."""
    return json.dumps(values, default=str).encode(errors="surrogatepass")


def files_of(folder: Path) -> dict[Path, Any]:
    found = {}
    for file in sorted(folder.rglob("*.json")):
        found[file] = json.loads(file.read_text(encoding="utf-8"))
    return found


def write_sentences(folder: Path) -> None:
    """A folder of sentence-transformers with every file that says something of its vectors."""
    shutil.copytree(BGE, folder, ignore=shutil.ignore_patterns("answers.npz", "*.pt"))
    width = json.loads((folder / "config.json").read_text(encoding="utf-8"))["hidden_size"]
    modules = json.loads((folder / "modules.json").read_text(encoding="utf-8"))[:2]
    modules += [{"idx": i, "path": f"{i}_{kind}", "type": f"sentence_transformers.models.{kind}"} for i, kind in LATER]
    tanh = "torch.nn.modules.activation.Tanh"
    files: dict[str, Any] = {
        "modules.json": modules,
        "2_Dense/config.json": {"in_features": width, "out_features": 5, "bias": False, "activation_function": tanh},
        "config_sentence_transformers.json": {"prompts": {"query": "one: "}, "default_prompt_name": "query"}
        | {"similarity_fn_name": "cosine"},
        "sentence_bert_config.json": {"max_seq_length": 16, "do_lower_case": False, "transformer_task": None}
        | {"modality_config": {"text": {"method_output_name": "last_hidden_state"}}, "module_output_name": None},
        "tokenizer_config.json": {"model_max_length": 16, "cls_token": "<s>", "mask_token": {"content": "<mask>"}},
    }
    for name, values in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(values), encoding="utf-8")
    save_file({"linear.weight": np.ones((5, width), np.float32)}, folder / "2_Dense" / "model.safetensors")
