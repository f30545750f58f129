"""Write a site, and read its list of files.

A site is a folder with the page, onnxruntime-web, the models and their tokenizer. Any web server can host it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import as_file, files
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any, Unpack

from export.settings import WebSettings
from mlx_transformer.core.outputs import Kind, claim
from mlx_transformer.core.shortlist import open_shortlist, shares_ids
from mlx_transformer.generation.settings import NO_SHORTLIST, named_files
from mlx_transformer.system.durable import Target, replace_folder
from mlx_transformer.system.errors import CommandLine, UserError
from mlx_transformer.system.files import read_json
from mlx_transformer.system.manifest import sha256
from mlx_transformer.text.tokenizer import Tokenizer

from .assets import TRANSFORMERS, WASM, WEBGPU, find_package, version_of
from .models import Graph, SiteModel, chat_facts, facts_of, read_models

if TYPE_CHECKING:
    from export.arguments import WebArguments

SITE = "site.json"
"""Lists the models, the files with their digests, and versions."""
FORMAT = 1
SERVICE_WORKER = "service_worker.js"
UNLISTED = (SITE, SERVICE_WORKER)
"""Files missing from that list: the list itself, and the service worker, which contains its digest."""


def is_site(folder: Path) -> bool:
    """Whether `write_site` of any version wrote this folder."""
    return all((folder / name).is_file() for name in UNLISTED)


def site_files(folder: Path, verify: bool = True) -> dict[str, str]:
    """{path in the folder: SHA-256} of a site's listed files.

    Raises UserError if the folder is no site or, with `verify`, if a file is missing or damaged.
    """
    if not is_site(folder):
        write = CommandLine("web", f"ONNX --out {quote(str(folder))}")
        raise UserError("{}: is no site; write one: {}", folder, write)
    try:
        values = read_json(folder / SITE)
        version = values["format"]
        files = {str(path): (str(entry["sha256"]), int(entry["bytes"])) for path, entry in values["files"].items()}
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{folder / SITE}: damaged ({error!r}); write the site again") from error
    if version != FORMAT:
        raise UserError(f"{folder / SITE}: format {version!r} is not known to this version (it reads format {FORMAT})")
    for path, (digest, size) in files.items():
        file = folder / path
        if not file.resolve().is_relative_to(folder.resolve()):
            raise UserError(f"{folder / SITE}: file name {path!r} leaves the folder")
        if verify and not (file.is_file() and file.stat().st_size == size and sha256(file) == digest):
            raise UserError(f"{file}: missing or damaged; write the site again")
    return {path: digest for path, (digest, _) in files.items()}


SITE_FOLDER = Kind("site", is_site, folder=True)
DIGITS = 16
"""Digits of a file's digest in its URL, enough for caches to tell versions apart."""
LARGE = ("models/", "ort/")
"""Folders of files fetched when they are needed; the service worker caches all others at once."""
TOKENIZER = "tokenizer.json"
INSIDE = "inside.html"
SHORTLIST = "models/shortlist.bin"
CHAT = "chat"
"""The folder, beside `page`, with files that only a chat has."""
SHARED = (
    *("client.js", "files.js", "icon.svg", "offline.js", "requests.js", "service_worker.js"),
    *("settings.js", "style.css", "view.js"),
)
"""Files of `page` that a chat also has."""


@dataclass(frozen=True)
class Inside:
    """A page on the inner values of a model's graphs.

    model: the model with inner values as outputs. taps: {graph: {point: output name}}, e.g. the point
    decoder.layers.0.self_attention.weights.
    """

    page: str
    model: SiteModel
    taps: Mapping[str, Mapping[str, str]]


def write_site(
    models: str | Path | Sequence[str | Path],
    out: Target,
    settings: WebSettings = WebSettings(),
    *,
    log: Callable[[str], None] = lambda _: None,
    inside: Callable[[Sequence[SiteModel], str], Inside] | None = None,
    **changes: Unpack[WebArguments],
) -> Path:
    """Write `out`, the folder of a static page that translates or chats with these models.

    models: folders of `export_onnx` for `web` or `portable`, or files of `export_search` without text (for decoders
    only folders). Each precision of a folder is a model of the page. All must come from the same weights. settings,
    changes: fields of `export.settings.WebSettings`; without `assets` see `assets.find_package`. inside: makes the page
    on inner values from the models and the heading, e.g. `export.explain.inside.inside`.

    Raises UserError for models a page can't run, for other files in `out`, and for a full disk.
    """
    settings = replace(settings, **changes)
    paths = [Path(models)] if isinstance(models, str | Path) else [Path(path) for path in models]
    if not paths:
        raise UserError("a site needs a model: an exported folder, or one file with the search")
    listed_file = None if settings.shortlist is None else Path(settings.shortlist)
    assets = None if settings.assets is None else Path(settings.assets)
    copied = assets if assets is None or assets.is_file() else find_package(assets)  # `out` may be beside it
    output = claim(out, SITE_FOLDER, settings.force, *paths, listed_file, copied)
    site_models = [model for path in paths for model in read_models(path, settings.verify)]
    _check_alike(site_models)
    listed = _shortlist(site_models[0], settings.shortlist)
    heading = settings.title or paths[0].resolve().name.removesuffix(".onnx")
    looked = None if inside is None else inside(site_models, heading)
    package, chats = find_package(assets, log), site_models[0].kind == CHAT
    webgpu = any(model.webgpu for model in site_models)
    runtime = [package / "dist" / name for name in WASM + (WEBGPU if webgpu else ())]
    versions = {"onnxruntime_web": version_of(package)}
    if chats:  # Transformers.js has ONNX Runtime inside, but for the WebAssembly
        transformers = find_package(assets, log, TRANSFORMERS)
        versions["transformers"] = version_of(transformers)
        runtime = [file for file in runtime if not file.name.startswith("ort.")]
        runtime += [transformers / "dist" / TRANSFORMERS.needed[0]]
    with replace_folder(output) as folder:
        _copy_page(folder, chats)
        (folder / "ort").mkdir()
        for file in runtime:
            shutil.copyfile(file, folder / "ort" / file.name)
        (folder / TOKENIZER).write_text(site_models[0].tokenizer, encoding="utf-8")
        if listed is not None:
            (folder / SHORTLIST).parent.mkdir()
            shutil.copyfile(listed, folder / SHORTLIST)
        entries = [_copy_model(model, folder) for model in site_models]
        inner = None if looked is None else _copy_inside(looked, folder)
        _write_json(folder / "manifest.webmanifest", _web_manifest(heading))
        facts = {
            "format": FORMAT,
            "title": heading,
            **versions,
            "webgpu": webgpu,
            "config": _facts(site_models[0]),
            "shortlist": None if listed is None else {"file": SHORTLIST, "shared": _shares_ids(site_models[0])},
            "models": entries,
            "inside": inner,
            "files": _listed(folder),
        }
        _write_json(folder / SITE, facts)
        _write_service_worker(folder, [*facts["files"], SITE])
    return output.path


def _facts(model: SiteModel) -> dict[str, Any]:
    if model.kind == CHAT:
        return chat_facts(model.config, model.settings, model.tokenizer)
    return facts_of(model.config, model.settings)


def _check_alike(models: Sequence[SiteModel]) -> None:
    first = models[0]
    for i, model in enumerate(models):
        if (model.kind == CHAT) != (first.kind == CHAT):
            raise UserError(f"{first.name} and {model.name}: a site translates or chats, not both: write two sites")
        if model.name in {other.name for other in models[:i]}:
            raise UserError(f"two models are called {model.name!r}: leave one of them out")
        if model.tokenizer != first.tokenizer or len({first.source, model.source} - {None}) > 1:
            raise UserError(f"{first.name} and {model.name} are of different weights: a site is of one model")


def _shortlist(model: SiteModel, chosen: Path | str | None) -> Path | None:
    """The site's shortlist file: `chosen`, or the one in the model's settings. Raises UserError if it is damaged, or of
    another model."""
    named = named_files(model.settings, model.place).values()
    file = next(iter(named), None) if chosen is None else None if str(chosen) == NO_SHORTLIST else Path(chosen)
    if file is not None:
        open_shortlist(file, model.config)
    return file


def _shares_ids(model: SiteModel) -> bool:
    return shares_ids(model.config, Tokenizer(model.tokenizer).separate)


def _copy_page(folder: Path, chats: bool) -> None:
    with as_file(files("export.web")) as web:
        own = {file.name: file for file in (web / ("chat" if chats else "page")).iterdir() if file.is_file()}
        for name, file in {**({name: web / "page" / name for name in SHARED} if chats else {}), **own}.items():
            shutil.copyfile(file, folder / name)


def _copy_model(model: SiteModel, folder: Path) -> dict[str, Any]:
    """Copy a model's files; return its entry in site.json."""
    place = f"models/{model.name.replace(', ', '-').replace(' ', '-')}"
    graphs_place = f"{place}/onnx" if model.kind == CHAT else place
    (folder / graphs_place).mkdir(parents=True, exist_ok=True)
    for file in model.beside:
        shutil.copyfile(file, folder / place / file.name)
    graphs = {name: _copy_graph(graph, folder, graphs_place) for name, graph in model.graphs.items()}
    paths = {graph["graph"] for graph in graphs.values()} | {d["file"] for g in graphs.values() for d in g["data"]}
    size = sum((folder / path).stat().st_size for path in paths)
    entry: dict[str, Any] = {"name": model.name, "kind": model.kind, "bytes": size}
    entry |= {"webgpu": model.webgpu, "float16": model.float16}
    if model.kind == CHAT:
        return {**entry, "folder": place, "file": model.file, "dtype": model.dtype}
    return {**entry, "graphs": graphs, "names": model.names, "attention": model.attention}


def _copy_inside(inside: Inside, folder: Path) -> dict[str, Any]:
    """Write the page on inner values; return its entry in site.json."""
    (folder / INSIDE).write_text(inside.page, encoding="utf-8")
    entry = _copy_model(inside.model, folder)
    for name, points in inside.taps.items():
        entry["names"][name]["outputs"] |= points
    return entry | {"taps": inside.taps}


def _copy_graph(graph: Graph, folder: Path, place: str) -> dict[str, Any]:
    name = f"{place}/{graph.file.name}"
    if graph.contents is None:
        shutil.copyfile(graph.file, folder / name)
    else:
        (folder / name).write_bytes(graph.contents)
    for known, file in graph.data.items():
        if not (folder / place / known).exists():
            shutil.copyfile(file, folder / place / known)
    return {"graph": name, "data": [{"name": known, "file": f"{place}/{known}"} for known in graph.data]}


def _listed(folder: Path) -> dict[str, dict[str, Any]]:
    """Size and digest of all files except the service worker, by path."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != SERVICE_WORKER)
    return {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": sha256(path)} for path in paths
    }


def _write_service_worker(folder: Path, paths: Iterable[str]) -> None:
    digests = {path: sha256(folder / path)[:DIGITS] for path in paths}
    shell = [path for path in digests if not path.startswith(LARGE)]
    file = folder / SERVICE_WORKER
    lists = f"const FILES = {json.dumps(digests)};\nconst SHELL = {json.dumps(shell)};\n"
    file.write_text(lists + file.read_text(encoding="utf-8"), encoding="utf-8")


def _web_manifest(title: str) -> dict[str, Any]:
    return {
        "name": title,
        "short_name": title[:12],
        "start_url": "./",
        "scope": "./",
        "display": "standalone",
        "background_color": "#fbfaf7",
        "theme_color": "#fbfaf7",
        "icons": [{"src": "icon.svg", "sizes": "any", "type": "image/svg+xml", "purpose": "any maskable"}],
    }


def _write_json(file: Path, values: Any) -> None:
    file.write_text(json.dumps(values, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
