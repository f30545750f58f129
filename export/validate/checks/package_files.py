"""Make the files around a package's graphs again from the checkpoint, and compare them.

Runtimes read these files beside the graphs: tokenizer, a text's vector, when a search ends, names of classes, and files
for other runtimes, e.g. genai_config.json. Each is made again by the code of the export (`package/around.py`) with the
choices recorded in mlx_transformer.json. It must be the same: JSON by its values, other files
by their bytes. The record itself must fit the graphs.

Not compared: facts only the export knew (`package/around.py`: versions, and how lower precisions change results), the
model card, which people edit, and the manifests, which are verified before.

Other programs must also get the checkpoint's token ids from the tokenizer's files. transformers, Optimum and
sentence-transformers tokenize with the library `tokenizers`, so the check reads the package's tokenizer.json with it,
and with this project's tokenizer. Special tokens in the text are split if tokenizer_config.json says so. The text:
lines in 20 scripts, the model's added tokens within lines, an encoder's prompts, and pairs. Some vocabularies look ids
up apart from the pieces (role "lookup" in `published_ids.py`); only this project's tokenizer reads such a file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import tokenizers
from onnx import numpy_helper

from export.graph.protos import all_nodes, metadata_of, read_model
from export.interface import GRAPHS, LISTED_CPU, ROWS_CPU, Port
from export.package.around import files_around, graphs_of, json_bytes, record, recorded_plan, with_findings
from export.package.plan import SHORTLIST_FILE, Plan
from export.precision.table import ACTIVATIONS, IN_BLOCKS, PRECISIONS, STANDARD, UNPACKED, blocks_operators
from export.search.metadata import CONFIG, GENERATION, GIVEN, SOURCE, inputs_of
from export.search.options import default_of
from export.search.triton import CONFIG as TRITON
from export.search.triton import FILE as TRITON_FILE
from export.search.triton import VERSION as TRITON_VERSION
from export.search.triton import config_of
from export.search.write import record as file_record
from export.search.write import recorded_plan as recorded_file
from export.search.write import settings_beside
from export.validate.findings import PackageFiles
from mlx_transformer.core.checkpoint import Checkpoint
from mlx_transformer.core.folders import ONNX_CONFIG, Place
from mlx_transformer.core.heads import VOCABULARY
from mlx_transformer.core.text_embedding import read_embedding
from mlx_transformer.core.tokenizer_files import JOINT, SIDES, side_texts
from mlx_transformer.generation.settings import SHORTLIST
from mlx_transformer.system.errors import UserError, shortened
from mlx_transformer.system.files import optional_object, read_bytes, read_text
from mlx_transformer.system.manifest import CARD, MANIFEST, read_manifest
from mlx_transformer.text.added_tokens import added_tokens
from mlx_transformer.text.published_ids import roles_of
from mlx_transformer.text.sentencepiece_tokenizer import is_sentencepiece
from mlx_transformer.text.tokenizer import Tokenizer, is_makers

GRAPHS_FOLDER = "onnx"
KEYS = 3
"""Most differing keys to report for a file."""
READ = {".json", ".onnx", ".onnx_data", ".safetensors", ".bin", ".pt", ".npz", ".model", ".spm", ".jinja", ".py"}
READ |= {".pbtxt", ".yml", ".yaml"}
READ_NAMES = {"vocab.txt", "merges.txt"}
"""Suffixes and names of files that runtimes may look for: an unknown file with such a name is an error."""
UNREADABLE = (UserError, LookupError, TypeError, ValueError, AttributeError, RecursionError)
"""Errors from a record that doesn't describe a possible export."""
OURS = "mlx_transformer."
"""Prefix of our metadata's keys in a file."""
ELSEWHERE = ("source", "adapter", "versions", "shortlist", "target", "graphs", "format")
"""Keys of the record without influence on how a runtime runs the graphs."""
OF_SCALES = ("scales", "calibration", "float32")
"""Such keys in the entry for int8, as runtimes read int8_scales.json."""


def package_files(opened: Checkpoint, path: Path) -> PackageFiles | None:
    """Compare the files of an exported folder, or the metadata of a single file with the search.

    None for another exporter's files.
    """
    return _of_one_file(opened, path) if path.is_file() else _of_folder(opened, path)


def _of_folder(opened: Checkpoint, path: Path) -> PackageFiles | None:
    within = path.name == GRAPHS_FOLDER and not (path / ONNX_CONFIG).is_file()
    folder = path.parent if within and (path.parent / ONNX_CONFIG).is_file() else path
    if not (folder / ONNX_CONFIG).is_file():
        ours = Place.of(folder).onnx and any((place / MANIFEST).is_file() for place in (folder, folder / GRAPHS_FOLDER))
        return PackageFiles(0, (f"{ONNX_CONFIG}: is missing",)) if ours else None
    try:
        values = parsed(read_bytes(folder / ONNX_CONFIG))
        plan = recorded_plan(opened, folder, values)
        written = with_findings(plan, values, record(plan))
    except UNREADABLE as error:
        return PackageFiles(0, (_why(error, ONNX_CONFIG, folder),), misleading=True)
    graphs, problems = _graphs(plan, folder)
    if isinstance(plan.shortlist, dict) and plan.shortlist.keys() == values["shortlist"].keys():
        if plan.shortlist != values["shortlist"]:
            problems.append(f"{SHORTLIST_FILE}: isn't the shortlist that the export was given")
        plan = replace(plan, shortlist=values["shortlist"])
    external = [name for name, data in graphs.items() if (folder / GRAPHS_FOLDER / data).is_file() and _own(name, data)]
    expected = files_around(plan, external)
    if plan.shortlist is not None:
        written["shortlist"] = plan.shortlist
    expected[ONNX_CONFIG] = json_bytes(written)
    misleading = written["source"] == values.get("source") and _misleads(values, written)
    for name, contents in sorted(expected.items()):
        problems += [f"{name}: {problem}" for problem in differences(folder / name, contents)]
    problems += token_problems(opened, folder)
    problems += _unlisted(folder, {*expected, *(f"{GRAPHS_FOLDER}/{name}" for name in graphs)})
    known = {*expected, CARD, MANIFEST, f"{GRAPHS_FOLDER}/{MANIFEST}"}
    known |= {f"{GRAPHS_FOLDER}/{name}" for pair in graphs.items() for name in pair}
    present = (file for file in folder.rglob("*") if file.is_file())
    extra = sorted(name for file in present if (name := file.relative_to(folder).as_posix()) not in known)
    read = [name for name in extra if Path(name).suffix in READ or Path(name).name in READ_NAMES]
    problems += [f"{name}: belongs to no export of the checkpoint; remove it" for name in read]
    unread = tuple(name for name in extra if name not in read)
    return PackageFiles(len(expected), tuple(problems), unread, misleading)


def _misleads(values: dict[str, Any], written: dict[str, Any]) -> bool:
    """Return whether the record's differences would make runtimes run the graphs differently."""

    def run_by(record: dict[str, Any]) -> dict[str, Any]:
        precisions = {
            name: {key: value for key, value in entry.items() if key not in OF_SCALES}
            for name, entry in record["precisions"].items()
        }
        return {key: value for key, value in record.items() if key not in ELSEWHERE} | {"precisions": precisions}

    return run_by(values) != run_by(written)


def _of_one_file(opened: Checkpoint, file: Path) -> PackageFiles | None:
    model = read_model(file)
    metadata = metadata_of(model)
    if CONFIG not in metadata:
        return None
    try:
        plan = recorded_file(opened, metadata, file)
        own = json.loads(metadata.get(GENERATION, "{}")).get(SHORTLIST, "")
    except UNREADABLE as error:
        return PackageFiles(0, (_why(error, file.name, file.parent),), misleading=True)
    text = any(value.type.tensor_type.elem_type == onnx.TensorProto.STRING for value in model.graph.input)
    stem = next((own.removesuffix(f".{name}") for name in plan.named if own.endswith(f".{name}")), file.stem)
    settings, named = settings_beside(plan, stem, text)
    problems: list[str] = []
    if plan.shortlist is not None and (recorded := json.loads(metadata[GIVEN])) != plan.shortlist:
        problems += [f"{name}: isn't the shortlist that the export was given" for name in named]
        plan = replace(plan, shortlist=recorded)
    expected = file_record(plan, settings, text)
    ours = {key for key in metadata if key.startswith(OURS)}
    differ = {key: [*_of_key(metadata.get(key), expected.get(key))] for key in sorted(ours | expected.keys())}
    problems += [f"{file.name}: {key}{problem}" for key, found in differ.items() for problem in found]
    problems += [f"{file.name}: {problem}" for problem in _defaults(model.graph, settings)]
    beside = {name: read_bytes(source, 1 << 31) for name, source in named.items()}
    triton = file.parent.parent / TRITON
    if file.name == TRITON_FILE and file.parent.name == TRITON_VERSION and triton.is_file():
        beside[f"../{TRITON}"] = config_of(model.graph)
    for name, contents in beside.items():
        problems += [f"{name}: {problem}" for problem in differences(file.parent / name, contents)]
    misleading = bool(differ[CONFIG]) and not differ[SOURCE]
    return PackageFiles(len(expected) + len(beside), tuple(problems), misleading=misleading)


def _of_key(found: str | None, expected: str | None) -> Iterator[str]:
    """Describe how a metadata entry differs; JSON is compared by its values."""
    if found is None or expected is None:
        if found != expected:
            yield f" is {'missing' if found is None else 'there'}, the checkpoint gives {_shown(expected)}"
        return
    if found == expected:
        return
    try:
        values, known = parsed(found.encode()), json.loads(expected)
    except (ValueError, RecursionError):
        values, known = found, expected
    if isinstance(known, dict):
        keys = list(differing(values, known))
        yield from (f": {problem}" for problem in keys[:KEYS])
    else:
        yield f" is {_shown(found)}, the checkpoint gives {_shown(expected)}"


def _defaults(graph: onnx.GraphProto, settings: Mapping[str, Any]) -> Iterator[str]:
    """Report a search's inputs whose default isn't the model's setting."""
    own, inputs = inputs_of(settings), {value.name for value in graph.input}
    for tensor in graph.initializer:
        if tensor.name in inputs and (expected := default_of(tensor.name, own)) is not None:
            found = numpy_helper.to_array(tensor)
            if found.dtype != expected.dtype or not np.array_equal(found, expected):
                yield f"input {tensor.name} is {found.tolist()} unless given, the checkpoint gives {expected.tolist()}"


def differences(file: Path, contents: bytes) -> Iterator[str]:
    """Describe how a file differs from its expected contents."""
    if not file.is_file():
        yield "is missing"
        return
    try:
        found = read_bytes(file, max(len(contents), 1 << 26))
    except UserError as error:
        yield str(error).removeprefix(f"{file}: ")
        return
    if found == contents:
        return
    if file.suffix != ".json":
        at = next((i for i, (a, b) in enumerate(zip(found, contents, strict=False)) if a != b), None)
        where = f"from byte {at:,} on" if at is not None else f"it has {len(found):,} bytes, not {len(contents):,}"
        yield f"isn't what the checkpoint gives: {where}"
        return
    try:
        values = parsed(found)
    except (ValueError, RecursionError) as error:
        yield f"is no JSON ({shortened(str(error))})"
        return
    keys = list(differing(values, json.loads(contents)))
    yield from keys[:KEYS]
    if len(keys) > KEYS:
        yield f"and {len(keys) - KEYS} more of its values differ"


def differing(found: Any, expected: Any, key: str = "") -> Iterator[str]:
    """Describe each key with another value or type, e.g. `beam is 4, the checkpoint gives 5`."""
    if isinstance(found, dict) and isinstance(expected, dict):
        for name in dict.fromkeys([*expected, *found]):
            inner = (f"{key}.{name}" if key else name) if name.isidentifier() else f"{key}[{_shown(name)}]"
            yield from differing(found.get(name, _NOTHING), expected.get(name, _NOTHING), inner)
    elif isinstance(found, list) and isinstance(expected, list) and len(found) == len(expected):
        for i, pair in enumerate(zip(found, expected, strict=True)):
            yield from differing(*pair, f"{key}[{i}]")
    elif type(found) is not type(expected) or found != expected:
        was, has = ("missing" if value is _NOTHING else _shown(value) for value in (found, expected))
        yield f"{key or 'all of it'} is {was}, the checkpoint gives {'nothing' if expected is _NOTHING else has}"


def parsed(contents: bytes) -> Any:
    """Parse JSON. Raises ValueError if it isn't JSON or has a key twice (some readers use the first, some the last)."""
    return json.loads(contents.decode(), object_pairs_hook=_once)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice} stands twice")
    return values


_NOTHING = object()


def _shown(value: Any) -> str:
    return shortened(json.dumps(value, ensure_ascii=False))


def _own(graph: str, data: str) -> bool:
    return data == f"{graph}_data"


def _graphs(plan: Plan, folder: Path) -> tuple[dict[str, str], list[str]]:
    """Return ({graph: its data file} of a plan, differences between these graphs and the record)."""
    graphs, problems = {}, []
    for precision in plan.precisions:
        suffix = PRECISIONS[precision].suffix
        for owner, names in graphs_of(plan, precision).items():
            for name in names:
                file = f"{name}{suffix}.onnx"
                graphs[file] = f"{owner}{suffix}.onnx_data"
                known = folder / GRAPHS_FOLDER / file
                if not known.is_file():
                    problems.append(f"{GRAPHS_FOLDER}/{file}: is missing")
                    continue
                graph = read_model(known).graph
                problems += [f"{GRAPHS_FOLDER}/{file}: {why}" for why in _unlike(plan, precision, name, graph)]
    return graphs, problems


def _unlike(plan: Plan, precision: str, name: str, graph: onnx.GraphProto) -> Iterator[str]:
    """Describe how a graph doesn't fit the record: inputs, outputs, and operators for blocks."""
    if precision == "float32" or name not in (ROWS_CPU, LISTED_CPU):
        ports = GRAPHS[name](plan.request)
        optional = {port.name for port in ports.inputs if port.default is not None}
        weights = {tensor.name for tensor in graph.initializer} - optional
        inputs = [value for value in graph.input if value.name not in weights]
        for kind, values, declared in (("input", inputs, ports.inputs), ("output", graph.output, ports.outputs)):
            found, expected = [*map(_port, values)], [*map(_declared, declared)]
            for each in expected:
                if each not in found:
                    yield f"has no {kind} {each}, which an export by {ONNX_CONFIG} has"
            for each in found:
                if each not in expected:
                    yield f"has the {kind} {each}, which an export by {ONNX_CONFIG} doesn't have"
    if precision in IN_BLOCKS:
        outputs = GRAPHS[name](plan.request).outputs
        vocabulary = plan.config.has_decoder or plan.config.head == VOCABULARY
        logits = any(port.value == "logits" for port in outputs)
        yield from _unlike_blocks(plan, precision, graph, vocabulary and logits)


def _unlike_blocks(plan: Plan, precision: str, graph: onnx.GraphProto, classifies: bool) -> Iterator[str]:
    """Describe where the type of activations isn't the record's.

    classifies: the graph has the classifier, whose operators show the type in every target.
    """
    nodes = list(all_nodes(graph))
    levels = {a.i for node in nodes if node.op_type == "MatMulNBits" for a in node.attribute if a.name == _LEVEL}
    if levels - {ACTIVATIONS[plan.activations]}:
        yield f"multiplies with other activations than {plan.activations}"
    if PRECISIONS[precision].form != "blocks":
        return
    operators = blocks_operators(precision, plan.target.lowering, plan.activations)
    blocks = any(node.op_type == "DequantizeLinear" for node in nodes)
    if blocks != (operators == STANDARD) or (operators == UNPACKED and levels):
        yield f"has other operators for blocks than {operators}"
    rounds = any(node.op_type in _ROUNDING for node in nodes)
    if plan.activations == "float32" and rounds:
        yield "rounds activations, which are float32"
    if plan.activations == "int8" and classifies and not (rounds or levels):
        yield "rounds no activations, which are int8"


_LEVEL = "accuracy_level"
_ROUNDING = ("MatMulInteger", "MatMulIntegerToFloat", "DynamicQuantizeLinear", "DynamicQuantizeMatMul")


def _port(value: onnx.ValueInfoProto) -> str:
    tensor = value.type.tensor_type
    axes = [d.dim_param or str(d.dim_value) for d in tensor.shape.dim]
    name = onnx.TensorProto.DataType.Name(tensor.elem_type)  # pyright: ignore[reportArgumentType]
    return f"{value.name} ({_TYPES.get(name, name.lower())}: {', '.join(axes)})"


def _declared(port: Port) -> str:
    return f"{port.name} ({port.dtype}: {', '.join(map(str, port.axes))})"


_TYPES = {"FLOAT": "float32"}


def _unlisted(folder: Path, names: set[str]) -> Iterator[str]:
    """Report files missing in their folder's manifest, as damage to them would go unnoticed.

    Nothing is reported for a folder without a manifest.
    """
    outer, inner = read_manifest(folder), read_manifest(folder / GRAPHS_FOLDER)
    for name in sorted(names):
        place, _, last = name.rpartition("/")
        listed, known = (inner, last) if place == GRAPHS_FOLDER else (outer, name)
        if listed is not None and known not in listed and place in ("", GRAPHS_FOLDER):
            yield f"{MANIFEST}: doesn't list {name}"


def _why(error: Exception, record: str, folder: Path) -> str:
    """Describe an error in the record, or in a file it refers to."""
    if isinstance(error, UserError) and str(error).startswith(f"{folder}/"):
        return str(error).removeprefix(f"{folder}/")
    why = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
    return f"{record}: says no export of the checkpoint ({why})"


LINES = (
    "The quick brown fox jumps over the lazy dog; it's 12,345.67 dollars (or 3 %).",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich.",
    "Tôi yêu tiếng nước tôi từ khi mới ra đời.",
    "Όλοι οι άνθρωποι γεννιούνται ελεύθεροι και ίσοι.",
    "Все люди рождаются свободными и равными.",
    "כל בני האדם נולדו בני חורין.",
    "يولد جميع الناس أحرارا متساوين في الكرامة.",
    "सभी मनुष्य स्वतंत्र पैदा होते हैं।",
    "সমস্ত মানুষ স্বাধীনভাবে জন্মগ্রহণ করে।",
    "எல்லா மனிதரும் சுதந்திரமாகப் பிறக்கின்றனர்.",
    "అందరు మనుష్యులు స్వతంత్రులుగా పుట్టారు.",
    "ಎಲ್ಲಾ ಮಾನವರೂ ಸ್ವತಂತ್ರರಾಗಿಯೇ ಹುಟ್ಟಿದ್ದಾರೆ.",
    "എല്ലാ മനുഷ്യരും സ്വതന്ത്രരായി ജനിക്കുന്നു.",
    "มนุษย์ทั้งหลายเกิดมามีอิสระ",
    "ყველა ადამიანი იბადება თავისუფალი.",
    "Բոլոր մարդիկ ծնվում են ազատ։",
    "모든 인간은 태어날 때부터 자유롭다.",
    "すべての人間は、生まれながらにして自由である。",
    "人人生而自由，在尊严和权利上一律平等。",
    "የሰው ልጅ ሁሉ ነጻ ሆኖ ይወለዳል።",
    "មនុស្សទាំងអស់កើតមកមានសេរីភាព។",
    "two  spaces , a\ttab 🙂 and <b>marks</b> [x] {y}",
    "Cafe\u0301 A\u030a \uff21\uff22\uff11 \ufb01ve \u2460 \u212b\u3000x",  # what normalisers change
    "a",
)
MANY = 12
"""Most added tokens to try, half of them the first and half the last; a vocabulary may have hundreds."""


def token_problems(opened: Checkpoint, folder: Path) -> list[str]:
    """Compare the ids from a package's tokenizer files with the checkpoint's tokenizer; a line for each wrong file."""
    text = opened.tokenizer_json()
    if text is None:
        return []
    sides = side_texts(text)
    parts = {JOINT: text} if sides is None else {SIDES[side]: each for side, each in sides.items()}
    prompts, problems = tuple(_prompts(opened)), list[str]()
    for name, own in parts.items():
        file = folder / name
        if not file.is_file():
            continue  # `package_files.py` reports it
        try:
            settings = optional_object(folder / "tokenizer_config.json")  # for a joint vocabulary
            splits = name != JOINT or settings.get("split_special_tokens") is True
            difference = _difference(own, read_text(file), splits, prompts, typed=not _fills_masks(opened))
        except (UserError, ValueError) as error:
            difference = f"can't be read ({shortened(str(error))})"
        problems += [f"{name}: {difference}"] if difference else []
    return problems


def lines_of(tokenizer: Tokenizer, prompts: Sequence[str] = ()) -> Iterator[str]:
    """Yield the lines to tokenize: `LINES`, lines with the model's added tokens, and lines after each prompt."""
    yield from LINES
    added = tokenizer.source.added
    for i, token in enumerate(added if len(added) <= MANY else [*added[: MANY // 2], *added[-MANY // 2 :]]):
        line = LINES[i % len(LINES)]
        yield from (token.content, f"{line} {token.content} {line}", f"x{token.content}y {token.content}, z")
    for prompt in prompts:
        yield from (prompt + line for line in LINES[:4])


@lru_cache(maxsize=8)
def _difference(own: str, text: str, splits: bool, prompts: tuple[str, ...], typed: bool) -> str | None:
    """Describe the first line with other ids by `text` than by `own`; None if there is none.

    own, text: the tokenizer.json of the checkpoint and of the package. splits: special tokens in a line are split like
    any text. typed: also compare lines in which somebody typed a special token.
    """
    ours, theirs = Tokenizer(own), Tokenizer(text)
    specification = json.loads(text)
    lines = [*lines_of(ours, prompts), *(_typed_roles(json.loads(own)) if typed else ())]
    rows = ours.source.encode_batch(lines)
    for line, expected, found in zip(lines, rows, theirs.source.encode_batch(lines), strict=True):
        if expected != found:
            return f"cuts {shortened(line)!r} into {found[:8]}, the checkpoint into {expected[:8]}"
    if "lookup" in roles_of(specification):
        return None
    library = tokenizers.Tokenizer.from_str(text)
    library.no_truncation()
    library.no_padding()
    library.encode_special_tokens = splits
    for line, expected in zip(lines, rows, strict=True):
        if (found := library.encode(line).ids) != expected:
            return f"is cut by `tokenizers` otherwise: {shortened(line)!r} into {found[:8]}, by us {expected[:8]}"
    pairs = list(zip(LINES[::2], LINES[1::2], strict=False)) if _has_pairs(ours) else []
    for pair, expected in zip(pairs, ours.encode_pairs(pairs) if pairs else (), strict=True):
        if (found := library.encode(*pair).ids) != expected.ids:
            return f"joins {shortened(str(pair))} otherwise by `tokenizers`: {found[:8]}, by us {expected.ids[:8]}"
    return None


def _typed_roles(specification: dict[str, Any]) -> Iterator[str]:
    """Yield lines with special tokens typed as text.

    Nothing for a maker's own file, in which other programs take such text for the token, nor for SentencePiece and
    unigram vocabularies: there `tokenizers` always does, even with `encode_special_tokens`.
    """
    listed = isinstance(specification["model"].get("vocab"), list)
    if is_makers(specification) or is_sentencepiece(specification) or listed:
        return
    for token in [token for token in added_tokens(specification) if token.special][:MANY]:
        yield f"a {token.content} b"


def _fills_masks(opened: Checkpoint) -> bool:
    """Whether a mask in text is the token. Other programs then take every typed special token for the token: they have
    one switch for all (`split_special_tokens`)."""
    return opened.config.architecture == "encoder" and opened.config.head.kind == "vocabulary"


def _has_pairs(tokenizer: Tokenizer) -> bool:
    """Return whether the vocabulary is an encoder's (it has a mask token), so that models may read pairs."""
    return roles_of(json.loads(tokenizer.own_json())).get("mask") is not None


def _prompts(opened: Checkpoint) -> list[str]:
    """Return the prompts of an encoder that gives vectors, from its embedding.json."""
    embedding = read_embedding(opened.folder, opened.config.d_model)
    return [] if embedding is None else [prompt for prompt in embedding.prompts.values() if prompt]
