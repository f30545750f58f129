"""`Place.of(path)` decides whether a path is a checkpoint, a run, an ONNX folder, a published model and so on.

It looks only at file names, keys of config.json and a file's first four bytes; no model is opened.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from shlex import quote
from typing import Any, Literal

from mlx_transformer.system.durable import previous
from mlx_transformer.system.errors import CommandLine, Text, UserError, joined
from mlx_transformer.system.files import check_name, read_json
from mlx_transformer.system.manifest import CARD, MANIFEST, digest_of, read_manifest, sha256

CONFIG, WEIGHTS = "config.json", "model.safetensors"
TORCH_WEIGHTS = "pytorch_model.bin"
ADAPTER, ARRAYS = "adapter.json", "adapter.safetensors"
PEFT_CONFIG, MLX_ADAPTER = "adapter_config.json", "adapters.safetensors"
ONNX_CONFIG = "mlx_transformer.json"
"""The model's config in an ONNX folder."""
MODULES = "modules.json"
"""Lists the parts of a sentence-transformers folder (`families/sentence_folder.py`)."""
FORMS = (WEIGHTS, f"{WEIGHTS}.index.json", TORCH_WEIGHTS, f"{TORCH_WEIGHTS}.index.json")
"""Weight files of published models, for import."""
WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin", "*.onnx", "onnx/*.onnx")
CONFIG_KEYS = {"model_type", "architectures", "vocab_size", "d_model"}
"""A model's config.json has at least one of these. Other programs also name their settings config.json."""
MARIAN_FILES = (".npz", ".bin")
GGUF = ".gguf"
IMPORTED = (
    *("bart", "bert", "distilbert", "m2m_100", "marian", "mbart", "modernbert", "mt5", "pegasus", "roberta", "t5"),
    *("umt5", "xlm-roberta", "gpt2", "llama", "mistral", "qwen2", "qwen3"),
    *("hunyuan_v1_dense", "smollm3", "phi3", "gemma", "gemma2", "gemma3", "gemma3_text", "olmo2"),
    "granite",
)
"""Every model_type that `families/table.py` imports, and "gemma3" for its text; copied here, as core may not import
families."""

HUB_NAME = re.compile(r"[a-z0-9]([\w.-]{0,94}\w)?/\w([\w.-]{0,94}\w)?", re.ASCII | re.IGNORECASE)
NO_HUB_NAME = re.compile(r"--|\.\.|\.git$")
"""Parts of names that fit `HUB_NAME` but that the Hub refuses."""

Model = Literal["a checkpoint", "a run", "an adapter", "a published adapter", "an ONNX model", "a published model"]
Other = Literal["a Triton model", "a Marian model", "a GGUF model", "a file", "a special file", "a folder"]
What = Model | Other | Literal["a name on the Hub", "nothing"]
A_CHECKPOINT, AN_ONNX_FOLDER, A_MODEL = "a checkpoint", "an ONNX folder", "a checkpoint or an ONNX folder"
FOLDER_OF_CHECKPOINT = f"checkpoint folder ({CONFIG}, {WEIGHTS})"


def may_be_called(name: str) -> bool:
    """Whether the Hugging Face Hub allows this name for a repository, e.g. "google-t5/t5-small"."""
    return HUB_NAME.fullmatch(name) is not None and NO_HUB_NAME.search(name) is None


class Place:
    """A path and its kind. Files are looked at once, on first use.

    >>> Place.of("runs/en-de").what
    'a run'
    """

    def __init__(self, path: Path):
        self.path = path

    @classmethod
    def of(cls, path: str | Path) -> Place:
        """Raises `UserError` if it can't be a path, e.g. with a NUL character."""
        check_name(path)
        return cls(Path(path))

    def holds(self, *names: str) -> bool:
        """Whether the folder has all of these files."""
        return all((self.path / name).is_file() for name in names)

    def matches(self, *patterns: str) -> bool:
        """Whether anything in the folder matches a glob pattern."""
        return any(any(self.path.glob(pattern)) for pattern in patterns)

    @cached_property
    def config(self) -> dict[str, Any] | None:
        """The contents of config.json; None if it is missing, damaged or no JSON object."""
        values = None
        with suppress(UserError):
            values = read_json(self.path / CONFIG) if self.holds(CONFIG) else None
        return values if isinstance(values, dict) else None

    @cached_property
    def graphs(self) -> bool:
        return self.path.is_dir() and self.matches("onnx/*.onnx", "*.onnx")

    @property
    def onnx(self) -> bool:
        """Whether ONNX Runtime can run the model. A published model with graphs and weights runs on MLX too."""
        return self.what == "an ONNX model" or self.graphs

    @property
    def runs_onnx(self) -> bool:
        """Whether the model runs on ONNX Runtime by default, not on MLX. Raises `UserError` if it is no model."""
        return self.check_model().what == "an ONNX model" or (self.graphs and not has_mlx())

    @cached_property
    def marian_models(self) -> list[Path]:
        """Files with weights in Marian's formats, e.g. model.npz."""
        models = (file for suffix in MARIAN_FILES for file in sorted(self.path.glob(f"*model*{suffix}")))
        return [file for file in models if ".optimizer." not in file.name and not file.name.startswith("pytorch_model")]

    @cached_property
    def checkpoint(self) -> Path | None:
        """The checkpoint folder: the path itself, `model/` in a run, or the old folder that a killed write left of
        either (`durable.previous`). None if there is none."""
        places = (self.path, self.path / "model", previous(self.path), previous(self.path / "model"))
        return next((place for place in places if Place(place).holds(CONFIG, WEIGHTS)), None)

    @cached_property
    def sure(self) -> What | None:
        """The kind of model or run, if the files leave no doubt; else None. Commands never write into such a folder."""
        return next((what for what, fits in SURE if fits(self)), None)

    @cached_property
    def what(self) -> What:
        path = self.path
        if path.is_dir():
            return self.sure or next(what for what, fits in LIKELY if fits(self))
        if path.is_file():
            return "a GGUF model" if begins_as_gguf(path) else FILES.get(path.suffix, "a file")
        if path.exists():
            return "a special file"
        if self.checkpoint is not None:
            return "a checkpoint"
        return "a name on the Hub" if may_be_called(str(path)) and path.suffix not in FILES else "nothing"

    def checkpoint_folder(self) -> Path:
        """The folder with config.json and model.safetensors. Raises `UserError` if there is no checkpoint."""
        found = self.checkpoint
        place = self if found in (None, self.path) else Place(found)
        if found is None or place.what not in ("a checkpoint", "a run"):
            raise place.error(A_CHECKPOINT)
        return found

    def check_model(self) -> Place:
        """Raise `UserError` unless this is a model that can be run: a checkpoint, ONNX or published model. Returns
        itself."""
        if self.what in ("a checkpoint", "a run"):
            self.checkpoint_folder()
        elif self.what != "an ONNX model" and not self.is_importable:
            raise self.error(A_MODEL)
        return self

    @property
    def is_importable(self) -> bool:
        """Whether `import` can make a checkpoint from it."""
        return self.what in ("a published model", "a published adapter", "a GGUF model")

    def error(self, needed: str) -> UserError:
        """The error of a command that needs another kind of path: the kind found, and how to convert it.

        needed: the required kind, e.g. `A_CHECKPOINT`.
        """
        path, what, name = self.path, self.what, quote(str(self.path))
        missing = " and ".join(file for file in (CONFIG, WEIGHTS) if not self.holds(file))
        damaged = f"not a checkpoint folder ({missing} missing)"
        saved = [f"; its newest checkpoint is {file.parent}" for file in sorted(path.glob(SAVED))]
        model_type = (self.config or {}).get("model_type", IMPORTED[0])
        known = f"model_type {model_type!r:.60} can't be imported; these can: {', '.join(sorted(IMPORTED))}"
        make = Text("make one of it: {}", CommandLine("import", f"{name} OUT"))
        export = Text("write one: {}", CommandLine("export", f"{name} OUT"))
        advice = {
            "a checkpoint": export,
            "a run": export,
            "an adapter": f"merge it into its base first: mlx-transformer merge BASE {name} OUT",
            "a published adapter": make,
            "a published model": make if model_type in IMPORTED else known,
            "a Marian model": make,
            "a GGUF model": make,
        }
        texts = {
            "a checkpoint": damaged if missing else None,
            "a run": None if self.checkpoint else f"this run has written no model yet{''.join(saved[-1:])}",
            "a file": f"is a file; a checkpoint is a folder with {CONFIG} and {WEIGHTS}",
            "a special file": "is neither a folder nor a regular file; a model is a folder, or one .onnx file",
            "a folder": damaged if needed == A_CHECKPOINT else f"neither a {FOLDER_OF_CHECKPOINT} nor {AN_ONNX_FOLDER}",
            "a name on the Hub": "no such folder",
            "nothing": f"no such {'file' if path.suffix in FILES else 'folder'}",
        }
        if what == "a folder" and (files := sorted(path.glob(f"*{GGUF}"))):
            texts["a folder"] = f"a folder of GGUF files; name one of them: {files[0]}"
        here = texts.get("a file" if path.is_file() and what == "an ONNX model" else what)
        return UserError(
            "{}: {}",
            path,
            here or joined([f"is {what}, and here {needed} is needed", *filter(None, [advice.get(what)])]),
        )


def _is_of_model(place: Place) -> bool:
    """Whether there are weights and a config.json that is a model's, or damaged."""
    known = place.config is None or not CONFIG_KEYS.isdisjoint(place.config)
    return place.holds(CONFIG) and known and place.matches(*WEIGHT_FILES)


def _is_of_run(place: Place) -> bool:
    parts = ("metrics.jsonl", "checkpoints", "model")
    return place.holds("distil.json") or (place.holds("run.json") and any((place.path / x).exists() for x in parts))


def _is_of_sentences(place: Place) -> bool:
    return place.holds(MODULES) and (place.holds("config_sentence_transformers.json") or place.matches("1_Pooling"))


def _lists_weights(place: Place) -> bool:
    """Whether a manifest lists a checkpoint's weights, even if the file itself is missing."""
    try:
        return WEIGHTS in (read_manifest(place.path) or ())
    except UserError:
        return place.holds(CONFIG) and is_ours(place.config)


Table = tuple[tuple[What, Callable[[Place], bool]], ...]
SURE: Table = (
    ("an ONNX model", lambda place: place.holds(ONNX_CONFIG)),
    ("a run", _is_of_run),
    ("an ONNX model", lambda place: _is_of_model(place) and place.graphs and not any(map(place.holds, FORMS))),
    ("a checkpoint", lambda place: _is_of_model(place) and is_ours(place.config)),
    ("a published model", lambda place: _is_of_model(place) or _is_of_sentences(place)),
    ("an adapter", lambda place: place.holds(ADAPTER, ARRAYS)),
    ("a published adapter", lambda place: place.holds(PEFT_CONFIG) and place.matches("adapter_model.*", MLX_ADAPTER)),
    ("a Triton model", lambda place: place.holds("config.pbtxt") and (place.path / "1").is_dir()),
    ("a Marian model", lambda place: place.holds("model.npz") and place.matches("*.yml")),
)
"""Folders whose files leave no doubt; the first matching row counts."""
LIKELY: Table = (
    ("an ONNX model", lambda place: place.graphs),
    (
        "a published model",
        lambda place: "model_type" in (place.config or {}) or (not place.config and place.holds(MODULES)),
    ),
    ("a checkpoint", _lists_weights),
    ("a run", lambda place: place.checkpoint is not None or place.matches(SAVED)),
    ("an adapter", lambda place: place.holds(ADAPTER)),
    ("a Marian model", lambda place: bool(place.marian_models) and not place.holds(CONFIG)),
    ("a folder", lambda _: True),
)
"""Further rows for folders that lack files or have no telling file names."""
FILES: dict[str, What] = {".onnx": "an ONNX model", **dict.fromkeys(MARIAN_FILES, "a Marian model")}
FILES[GGUF] = "a GGUF model"
SAVED = f"checkpoints/step-*/{MANIFEST}"
"""Manifests of the checkpoints saved during a run."""


def begins_as_gguf(file: Path) -> bool:
    """Whether a file is GGUF, by its first bytes: some programs store such models under other names."""
    with suppress(OSError), open(file, "rb") as opened:
        return opened.read(4) == b"GGUF"
    return False


def is_ours(config: Mapping[str, Any] | None) -> bool:
    """Whether a model's config.json is in our format, not in Hugging Face's. None (unreadable) counts as ours."""
    return config is None or ("d_model" in config and config.keys().isdisjoint(("model_type", "architectures")))


def has_mlx() -> bool:
    try:
        return find_spec("mlx") is not None
    except ModuleNotFoundError:
        return False


def check_there(path: str | Path) -> None:
    """Raise `UserError` if a path doesn't exist and can't be the name of a model on the Hugging Face Hub.

    This is fast: commands check it before the slow imports.
    """
    place = Place.of(path)
    if place.what == "nothing":
        raise place.error(A_MODEL)


def fingerprint(path: Path) -> str:
    """Hash all files of a model, to notice changes. Raises `UserError` if the path is no model.

    path: a checkpoint, a run (only its checkpoint counts), an ONNX folder, a published model, or an ONNX file with its
    data file. The model card is left out, because people edit it.
    """
    place = Place.of(path)
    if path.is_file():
        files = [path, *path.parent.glob(f"{path.name}_data")]
        folder = path.parent
    else:
        folder = place.checkpoint_folder() if place.check_model().what in ("a checkpoint", "a run") else path
        files = [file for file in folder.rglob("*") if file.is_file() and file.name != CARD]
    return digest_of(f"{file.relative_to(folder).as_posix()} {sha256(file)}\n".encode() for file in sorted(files))
