"""Names, labels, texts and records that are markup: no page that we write has an element or a script of theirs."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from random import Random
from typing import Any

from attempts import Attempt
from kind import Class, nothing

MARK = "fuzzed"
"""Part of every piece of markup below; nothing of ours has it."""
MARKUP = (
    *(
        "<fuzzed>",
        "<script>fuzzed()</script>",
        "</script><fuzzed>",
        '"><img src=x onerror=fuzzed()>',
        "<!--<script>fuzzed",
    ),
    *(
        "' onfocus='fuzzed()' x='",
        '" onload="fuzzed()" x="',
        "javascript:fuzzed()",
        "<svg onload=fuzzed()>",
        "]]><fuzzed>",
    ),
    *(
        "</style><fuzzed>",
        "</title><fuzzed>",
        "</textarea><fuzzed>",
        "&lt;fuzzed&gt;<fuzzed>",
        "`${fuzzed()}`",
        "\\u003cfuzzed>",
    ),
    *(
        "</text><fuzzed/>",
        "[a](javascript:fuzzed())",
        "<a href='javascript:fuzzed()'>a</a>",
        "\u2028<fuzzed>",
        "</SCRIPT ><fuzzed>",
    ),
)
LINKS = ("href", "src", "action", "formaction", "xlink:href", "data")


class Page(HTMLParser):
    """The elements of a page that somebody else has put there."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.script = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.script = tag == "script"
        values = [(name, value or "") for name, value in attrs]
        strange = [name for name, value in values if MARK in name or (name.startswith("on") and MARK in value)]
        strange += [name for name, value in values if name in LINKS and value.strip().lower().startswith("javascript:")]
        if MARK in tag or strange:
            self.found.append(self.get_starttag_text() or tag)

    def handle_endtag(self, tag: str) -> None:
        self.script = False

    def handle_data(self, data: str) -> None:
        # In a script a comment's begin and an element's change where the script ends.
        if self.script and MARK in data and any(part in data.lower() for part in ("<!--", "</script", "<script")):
            self.found.append(data[max(0, data.index(MARK) - 40) :][:90])


def strange_parts(html: str) -> list[str]:
    """What a page has of somebody else's markup as markup."""
    page = Page()
    page.feed(html)
    page.close()
    return page.found


def check_pages(folder: Path) -> int:
    """Look at every page that lies in a folder."""
    pages = [path for path in sorted(folder.rglob("*")) if path.suffix in (".html", ".svg") and path.is_file()]
    for path in pages:
        found = strange_parts(path.read_text(encoding="utf-8"))
        assert not found, (path.name, found[:3])
    return len(pages)


def _texts(value: Any, random: Random) -> Any:
    """The same with strings that are markup, here and there."""
    if isinstance(value, dict):
        return {key: _texts(inner, random) for key, inner in value.items()}
    if isinstance(value, list):
        return [_texts(inner, random) for inner in value]
    return random.choice(MARKUP) if isinstance(value, str) and random.random() < 0.5 else value


def _in_name(random: Random) -> str:
    return random.choice([text for text in MARKUP if "/" not in text])


def pages(random: Random, folder: Path) -> Attempt:
    """One command that writes a page, of data that is markup."""
    kind = random.choice(["report", "explain", "labels", "compare", "validate", "web", "serve"])
    name, text = _in_name(random), " ".join(random.choices(MARKUP, k=random.choice([1, 2])))
    out = folder / "pages"
    lines = folder / "lines.txt"

    def moved(model: str) -> str:
        place = folder / f"{model} {name}"
        (folder / model).rename(place)
        return str(place)

    def python() -> object:
        from mlx_transformer import cli

        def call(*arguments: str) -> None:
            try:
                cli.main(list(arguments))
            except SystemExit as done:
                if done.code not in (0, 1, 2):
                    raise AssertionError(done.code) from done

        out.mkdir()
        lines.write_text(f"{text}\none two\n", encoding="utf-8")
        if kind == "report":
            run = folder / "run"
            record = json.loads((run / "run.json").read_text(encoding="utf-8"))
            record |= {key: _texts(record[key], random) for key in ("device", "versions", "data")}
            (run / "run.json").write_text(json.dumps(record), encoding="utf-8")
            samples = [{"source": text, "reference": random.choice(MARKUP), "output": text}]
            with (run / "metrics.jsonl").open("a", encoding="utf-8") as file:
                for entry in (
                    {"kind": "samples", "step": 2, "samples": samples},
                    {"kind": "train", "step": 2, text: 1.0},
                ):
                    file.write(json.dumps(entry) + "\n")
            call("report", moved("run"), "--out", str(out / "x.html"))
        elif kind == "explain":
            model = random.choice(["model", "onnx"])
            call("explain", moved(model), text, "--out", str(out / "x.html"), "--max-new-tokens", "6")
        elif kind == "labels":
            config = folder / "classes" / "config.json"
            values = json.loads(config.read_text(encoding="utf-8"))
            values["head"]["labels"] = [random.choice(MARKUP) + str(i) for i in range(len(values["head"]["labels"]))]
            config.write_text(json.dumps(values), encoding="utf-8")
            (folder / "classes" / "manifest.json").unlink()
            call("explain", moved("classes"), text, "--out", str(out / "x.html"))
            call("export", f"{folder}/classes {name}", str(out / "onnx"))
        elif kind == "compare":
            call("compare", moved("model"), moved("onnx"), "--source", str(lines), "--out", str(out / "x.html"))
        elif kind == "validate":
            call("validate", moved("model"), moved("onnx"), "--html", str(out / "x.html"))
        elif kind == "web":
            call("web", moved("page"), "--out", str(out / "site"), "--assets", str(folder / "node_modules"))
        else:
            _served(folder, name, text, out)
        check_pages(out)
        for card in out.rglob("README.md"):
            found = strange_parts(card.read_text(encoding="utf-8").partition("\n---\n")[2])
            assert not found, (card.name, found[:3])
        return kind

    python.__name__ = f"{kind} {name} {text}"
    return python


def _served(folder: Path, name: str, text: str, out: Path) -> None:
    """Every answer of the server that is a page."""
    from starlette.testclient import TestClient
    from waiting import until

    from export.serve.app import App
    from export.serve.batching import Batcher
    from export.serve.models import Named
    from export.serve.opening import load_all, open_onnx
    from export.settings import ServeSettings

    settings = ServeSettings(threads=1)
    models = Named.of([f"en-de={folder / 'onnx'}"])
    app = App(lambda: load_all(models, settings, open_onnx), Batcher(8, 0, 64))
    with TestClient(app.asgi, raise_server_exceptions=False) as http_:
        until(lambda: http_.get("/health").status_code == 200)
        for i, path in enumerate(("/", "/docs", f"/{name}", f"/docs?{text}", f"/translate?q={name}")):
            answer = http_.get(path, headers={"X": "x"})
            assert answer.status_code < 500, answer.status_code
            if "html" in answer.headers.get("content-type", ""):
                (out / f"{i}.html").write_text(answer.text, encoding="utf-8")


INJECTED = (
    Class(
        "markup on pages",
        ("run", "model", "onnx", "classes", "page", "node_modules"),
        nothing,
        pages,
        15,
    ),
)
