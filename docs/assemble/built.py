"""The site as it was built: every link leads somewhere, and nothing is fetched from another host."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

SHIM = "https://unpkg.com/iframe-worker/shim"
"""What the generator fetches so that the search runs in files opened without a server."""
OWN_SHIM = "search-from-files.js"
ASSETS = {"img": "src", "script": "src", "link": "href", "source": "src", "iframe": "src", "use": "href"}
NO_ASSETS = {"canonical", "next", "prev", "alternate"}
"""Kinds of <link> that fetch nothing."""


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.assets: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.ids |= {found[name] for name in ("id", "name") if name in found}
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        elif tag in ASSETS and ASSETS[tag] in found and found.get("rel") not in NO_ASSETS:
            self.assets.append(found[ASSETS[tag]])


def finish(site: Path) -> None:
    """The search takes a file of ours in the place of the one from another host; a keyboard and a screen reader meet no
    link without words at each line of code, and no head without words over a column."""
    for file in sorted(site.rglob("*.html")):
        up = "../" * (len(file.relative_to(site).parts) - 1)
        text = file.read_text(encoding="utf-8").replace(SHIM, up + OWN_SHIM)
        text = re.sub(r'<a id="(__codelineno-[\d-]+)" name="\1" href="#\1"></a>', r'<a id="\1"></a>', text)
        text = re.sub(r"<th([^>]*)>\s*</th>", r"<td\1></td>", text)
        file.write_text(text, encoding="utf-8")


def problems(site: Path) -> list[str]:
    """One line for each link that leads nowhere and each asset that another host has."""
    pages = {file: _read(file) for file in sorted(site.rglob("*.html"))}
    found = []
    for file, page in pages.items():
        where = file.relative_to(site).as_posix()
        for asset in page.assets:
            if urlsplit(asset).scheme in ("http", "https") or asset.startswith("//"):
                found.append(f"{where}: fetches {asset}")
        for link in {*page.links, *page.assets}:
            parts = urlsplit(link)
            if parts.scheme or link.startswith("//") or where == "404.html":
                continue
            target = file if not parts.path else (file.parent / unquote(parts.path)).resolve()
            if not target.exists():
                found.append(f"{where}: {link}: no such file")
            elif (
                parts.fragment
                and "=" not in parts.fragment
                and target in pages
                and unquote(parts.fragment) not in pages[target].ids
            ):
                found.append(f"{where}: {link}: no such place in it")
    for file in sorted(site.rglob("*.css")):
        for address in re.findall(r"(?:url\(|@import )['\"]?(https?:[^'\")]*)", file.read_text(encoding="utf-8")):
            found.append(f"{file.relative_to(site).as_posix()}: fetches {address}")
    return found


def _read(file: Path) -> _Page:
    page = _Page()
    page.feed(file.read_text(encoding="utf-8"))
    return page
