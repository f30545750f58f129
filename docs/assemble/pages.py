"""Which page of the site holds which part of which file, read from docs/site.toml."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from .markdown import Part, parts, slug
from .problem import Problem

PACKAGES = ("mlx_transformer", "export")


@dataclass(frozen=True)
class Page:
    """`sources`: files of the repository, or parts of them, `file#heading`."""

    title: str
    path: str
    """Of the page, relative to the site's root, such as `start/quickstart.md`."""
    sources: tuple[str, ...]


class Site:
    """The table of docs/site.toml: section -> title of a page -> its sources."""

    def __init__(self, root: Path):
        self.root = root
        table = tomllib.loads((root / "docs/site.toml").read_text(encoding="utf-8"))
        self.sections: dict[str, list[Page]] = {}
        for section, pages in table.items():
            self.sections[section] = [
                Page(title, f"{slug(section)}/{slug(title)}.md", tuple(sources)) for title, sources in pages.items()
            ]
        if others := self._others():
            self.sections["More"] = others
        first = next(iter(self.sections.values()))
        first[0] = Page(first[0].title, "index.md", first[0].sources)

    def _others(self) -> list[Page]:
        """A page for each folder's README that the table doesn't name."""
        named = {source.partition("#")[0] for page in self.pages for source in page.sources}
        files = [path for package in PACKAGES for path in sorted((self.root / package).rglob("README.md"))]
        paths = [path.relative_to(self.root) for path in files]
        return [
            Page(self.parts(path.as_posix())[0].title, f"more/{slug(str(path.parent))}.md", (path.as_posix(),))
            for path in paths
            if path.as_posix() not in named
        ]

    @property
    def pages(self) -> list[Page]:
        return [page for pages in self.sections.values() for page in pages]

    @cached_property
    def placed(self) -> dict[tuple[str, str], Page]:
        """(file, heading) -> its page; heading "" is the file's own beginning."""
        found: dict[tuple[str, str], Page] = {}
        for page in self.pages:
            for source in page.sources:
                file, _, heading = source.partition("#")
                if heading:
                    found |= {(file, name): page for name in self.part(file, heading).slugs}
        for page in self.pages:
            for source in page.sources:
                if "#" in source:
                    continue
                found[source, ""] = page
                for part in self.parts(source):
                    found |= {(source, name): page for name in part.slugs if (source, name) not in found}
        return found

    def parts(self, file: str) -> list[Part]:
        path = self.root / file
        if not path.is_file():
            raise Problem(f"docs/site.toml: {file} does not exist")
        return parts(path.read_text(encoding="utf-8"))

    def part(self, file: str, heading: str) -> Part:
        found = next((part for part in self.parts(file) if part.slug == heading), None)
        if found is None:
            raise Problem(f"docs/site.toml: {file} has no heading #{heading}")
        return found

    def text(self, page: Page, source: str) -> str:
        """Of one source, as the page shows it: what has a page of its own is left out of its file's."""
        file, _, heading = source.partition("#")
        if heading:
            part = self.part(file, heading)
            first = source == page.sources[0]
            head = f"# {page.title} {{ #{part.slug} }}" if first else part.lines[0]
            return "\n".join([head, *part.lines[1:]])
        apart = {other.partition("#")[2] for other in page.sources if other.startswith(f"{file}#")}
        kept = [part for part in self.parts(file) if self.placed[file, part.slug] is page and part.slug not in apart]
        return "\n".join(line for part in kept for line in part.lines)
