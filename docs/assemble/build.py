"""The folder that the site generator reads: pages with links that lead within the site, sources, the API's pages."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

from claims.formula import as_mathml

from export.explain import page as walk_page
from export.explain.inside import shipped

from . import claim_pages
from .api import api_pages
from .captions import beside, palette, within
from .directives import expand
from .markdown import replace_formulas, replace_links
from .pages import Page, Site
from .problem import Problem
from .symbols import definition

WALK = "walk.html"
"""The walk through the models that ship, at the site's root."""
LANGUAGES = {".py": "python", ".toml": "toml", ".js": "js", ".css": "css", ".md": "md"}
PICTURE = re.compile(r'(?<=<img src=")[^":]+')
FIGURE = re.compile(r"(?:^|\D)0*(\d+)(?:\D.*)?\.svg$")


class Build:
    """Writes `out`: zensical.toml and pages/. figures: folder with pictures of the claims, named by their rows."""

    def __init__(self, root: Path, out: Path, figures: Path | None = None):
        self.root, self.out, self.pages = root, out, out / "pages"
        self.site = Site(root)
        self.sources: set[str] = set()
        self.claims = claim_pages.rows() if (claim_pages.INDEX, "") in self.site.placed else {}
        self.figures = {}
        for file in sorted(figures.iterdir()) if figures else []:
            if match := FIGURE.search(file.name):
                self.figures.setdefault(int(match[1]), file)

    def write(self) -> None:
        shutil.rmtree(self.pages, ignore_errors=True)
        for page in self.site.pages:
            self._write(page.path, self._text(page))
        for path, text in api_pages(self.root).items():
            self._write(path, text)
        for number, row in self.claims.items():
            self._write(claim_pages.path_of(number), self._claim(row))
        self._write(WALK, self._walk())
        for file in sorted(self.sources):
            self._write(f"source/{file}.md", self._source(file))
        for file in self.figures.values():
            (self.pages / "figures").mkdir(exist_ok=True)
            shutil.copyfile(file, self.pages / "figures" / file.name)
        shutil.copyfile(self.root / "docs/search-from-files.js", self.pages / "search-from-files.js")
        self._write("site.css", (self.root / "docs/site.css").read_text(encoding="utf-8") + palette())
        self._configure()

    def _write(self, path: str, text: str) -> None:
        file = self.pages / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n", encoding="utf-8")

    def _text(self, page: Page) -> str:
        here = Path(page.path).parent.as_posix()
        figures = {row: relative(f"figures/{file.name}", here) for row, file in self.figures.items()}
        texts = []
        for source in page.sources:
            file = source.partition("#")[0]
            text = self.site.text(page, source)
            text = replace_formulas(text, as_mathml) if file.startswith("docs/guide/") else text
            text = replace_links(text, lambda match, file=file: self._link(match, file, here))
            strict = file.startswith("docs/")
            if file == claim_pages.INDEX:
                text = claim_pages.with_links(text, lambda path: relative(path, here))
            text = PICTURE.sub(lambda match, file=file: self._picture(match[0], file, here), text)
            texts.append(
                expand(
                    text,
                    self.root,
                    figures,
                    lambda f, name, label: self._source_link(f, name, label, here),
                    relative(WALK, here),
                    strict,
                )
            )
        short = not any(re.search(r"^## ", text, re.MULTILINE) for text in texts)
        wide = ["---", "hide: [toc]", "---", ""] if short else []
        return "\n".join([*wide, "\n\n".join(texts)])

    def _claim(self, row: Any) -> str:
        here = Path(claim_pages.path_of(row.number)).parent.as_posix()
        file = self.figures.get(row.number)
        figure = relative(f"figures/{file.name}", here) if file else None
        return claim_pages.page(
            row, self.root, figure, lambda file, name, label: self._source_link(file, name, label, here)
        )

    def _picture(self, path: str, file: str, here: str) -> str:
        """The place of a copy of a picture that `file` shows, as a page in the folder `here` has it."""
        source = self.root / os.path.normpath(f"{Path(file).parent}/{path}")
        if not source.is_file():
            raise Problem(f"{file}: {path}: no such picture")
        (self.pages / "pictures").mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, self.pages / "pictures" / source.name)
        return relative(f"pictures/{source.name}", here)

    def _link(self, match: re.Match[str], file: str, here: str) -> str:
        """A link of `file` as a page in the folder `here` has it."""
        picture, label, path, fragment = match[1], match[2], match[3], match[4] or ""
        target = os.path.normpath(f"{Path(file).parent}/{path}") if path else file
        if not (self.root / target).exists():
            raise Problem(f"{file}: {match[0]} leads nowhere")
        if picture:
            if not target.endswith(".svg"):
                return beside(self._picture(path, file, here), label)
            row = self.claims.get(int(Path(target).stem)) if Path(target).stem.isdecimal() else None
            if row is not None and row.table is not None:
                return claim_pages.table(row, label)
            return within((self.root / target).read_text(encoding="utf-8"), f"f{Path(target).stem}", label)
        if (self.root / target).is_dir():
            target = f"{target}/README.md"
        if target == claim_pages.INDEX and fragment.startswith("row-"):
            return f"[{label}]({relative(claim_pages.path_of(int(fragment.removeprefix('row-'))), here)})"
        page = self.site.placed.get((target, fragment))
        if page is not None:
            first = any(source == f"{target}#{fragment}" for source in page.sources[:1])
            anchor = f"#{fragment}" if fragment and not first else ""
            return f"[{label}]({relative(page.path, here)}{anchor})"
        if target.endswith(".md"):
            raise Problem(f"{file}: {match[0]}: the site has no such page; add it to docs/site.toml")
        return self._source_link(target, fragment, label, here)

    def _source_link(self, file: str, symbol: str, label: str, here: str) -> str:
        """HTML, for the generator knows headings only, not lines of code."""
        self.sources.add(file)
        anchor = f"#__codelineno-0-{definition(self.root / file, symbol).first}" if symbol else ""
        text = html.escape(label.strip("`"))
        text = f"<code>{text}</code>" if label.startswith("`") else text
        return f'<a class="source" href="{relative(f"source/{file}.html", here)}{anchor}">{text}</a>'

    def _walk(self) -> str:
        links = {file: self._address(file) for file in sorted(walk_page.files_named())}
        return walk_page.page(shipped(), links=links)

    def _address(self, file: str) -> str:
        """Of the page that shows a file, as one at the site's root links to it."""
        shown = self.site.placed.get((file, ""))
        if shown is not None:
            return shown.path.removesuffix(".md") + ".html"
        self.sources.add(file)
        return f"source/{file}.html"

    def _source(self, file: str) -> str:
        text = (self.root / file).read_text(encoding="utf-8")
        head = "---\nhide: [navigation, toc]\nsearch:\n  exclude: true\n---\n"
        language = LANGUAGES.get(Path(file).suffix, "text")
        return f'{head}\n# {file}\n\n`````` {{ .{language} linenums="1" }}\n{text.rstrip()}\n``````'

    def _configure(self) -> None:
        nav = [{section: [self._entry(page) for page in pages]} for section, pages in self.site.sections.items()]
        nav.append({"API": [{path.partition("/")[2].removesuffix(".md"): path} for path in api_pages(self.root)]})
        text = (self.root / "docs/zensical.toml").read_text(encoding="utf-8")
        for key, value in {"nav": nav, "paths": [str(self.root)]}.items():
            text = text.replace(f"{key} = []", f"{key} = {_toml(value)}")
        (self.out / "zensical.toml").write_text(text, encoding="utf-8")

    def _entry(self, page: Page) -> dict[str, Any]:
        """A page in the list of pages; that of the claims has a page for each below it."""
        if page.sources != (claim_pages.INDEX,):
            return {page.title: page.path}
        rows = [{claim_pages.named(row): claim_pages.path_of(number)} for number, row in self.claims.items()]
        return {page.title: [{"All claims": page.path}, *rows]}


def relative(path: str, here: str) -> str:
    return os.path.relpath(path, here or ".").replace(os.sep, "/")


def _toml(value: object) -> str:
    """Lists, strings and tables of one line; a string of JSON is one of TOML."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {_toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value)
