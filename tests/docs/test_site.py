"""The pages of the site, put together without its generator, and the check of what the generator makes of them."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from assemble.build import Build
from assemble.built import OWN_SHIM, SHIM, finish, problems
from assemble.directives import expand
from assemble.markdown import parts, slug
from assemble.pages import Site
from assemble.problem import Problem
from imports import ROOT

PAGE_LINK = re.compile(r"\]\((?!\w+:)([^)\s#]+)(?:#([^)\s]+))?\)")
SOURCE_LINK = re.compile(r'href="([^"#]+)\.html(?:#__codelineno-0-(\d+))?"')


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("docs")
    Build(ROOT, out).write()
    return out / "pages"


def outside_code(text: str) -> str:
    return re.sub(r"^(`{3,}).*?^\1$", "", text, flags=re.MULTILINE | re.DOTALL)


def test_every_link_between_pages_leads_somewhere(pages: Path) -> None:
    links = 0
    for page in (page for page in pages.rglob("*.md") if "source" not in page.parts):
        text = outside_code(page.read_text(encoding="utf-8"))
        for path, heading in PAGE_LINK.findall(text):
            target = page.parent / path
            assert target.is_file(), f"{page.name}: {path}"
            slugs = {name for part in parts(target.read_text(encoding="utf-8")) for name in part.slugs}
            assert not heading or heading in slugs, f"{page.name}: {path}#{heading}"
            links += 1
        for path, line in SOURCE_LINK.findall(text):
            target = page.parent / f"{path}.md"
            assert target.is_file() or target.with_suffix(".html").is_file(), f"{page.name}: {path}"
            assert not line or int(line) <= len(target.read_text(encoding="utf-8").splitlines())
            links += 1
    assert links > 100


STATIONS = {
    "token",
    "row",
    "position",
    "cell",
    "heads",
    "norm",
    "feed-forward",
    "cross",
    "logits",
    "search",
    "training",
}
"""Each opened by the page of the guide that tells of it."""


def test_a_link_to_a_station_that_is_none_is_a_problem() -> None:
    with pytest.raises(Problem, match="the walk has no station sell"):
        expand("<!-- walk #at=sell See one cell -->", ROOT, {}, lambda *_: "")


def test_the_walk_is_a_page_whose_links_lead_within_the_site(pages: Path) -> None:
    [data] = re.findall(r'id="walk-data">(.*?)</script>', (pages / "walk.html").read_text(encoding="utf-8"), re.DOTALL)
    links = json.loads(data)["links"]
    assert links["docs/guide/feedforward.md"] == "guide/feed-forward.html"
    for address in links.values():
        assert (pages / address).with_suffix(".md").is_file(), address
    claims = (pages / links["docs/claims/README.md"]).with_suffix(".md").read_text(encoding="utf-8")
    assert 'id="row-15"' in claims
    assert 'href="../walk.html"' in (pages / "guide/through-the-paper.md").read_text(encoding="utf-8")
    attention = (pages / "guide/attention.md").read_text(encoding="utf-8")
    assert 'href="../walk.html#stack=decoder&amp;layer=0&amp;head=1&amp;at=cell"' in attention
    opened = {station for file in (pages / "guide").iterdir()
              for station in re.findall(r"walk\.html#[^\"]*at=([\w-]+)", file.read_text(encoding="utf-8"))}  # fmt: skip
    assert opened == STATIONS


def test_every_document_has_a_page(pages: Path) -> None:
    """And none is copied: what the site shows are the files themselves."""
    shown = {source.partition("#")[0] for page in Site(ROOT).pages for source in page.sources}
    files = {file.relative_to(ROOT).as_posix() for top in ("mlx_transformer", "export", "docs") for file in
             (ROOT / top).rglob("*.md")}  # fmt: skip
    assert files | {"README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"} <= shown
    text = "".join(page.read_text(encoding="utf-8") for page in pages.rglob("*.md") if "source" not in page.parts)
    for part in parts((ROOT / "README.md").read_text(encoding="utf-8")):
        assert text.count("\n".join(line for line in part.lines[1:4] if "](" not in line)) >= 1, part.title


def test_a_new_readme_has_a_page_without_being_named(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/site.toml").write_text('["Start"]\n"All" = ["README.md"]\n')
    for folder, title in ((".", "All"), ("export/new", "A new thing")):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / "README.md").write_text(f"# {title}\n\n## Part\n\ntext\n")
    site = Site(tmp_path)
    assert [(page.title, page.path) for page in site.pages] == [
        ("All", "index.md"),
        ("A new thing", "more/exportnew.md"),
    ]
    assert site.placed["export/new/README.md", "part"] is site.pages[1]


def test_each_part_of_a_file_is_on_one_page(pages: Path) -> None:
    headings = re.findall(r"^## (.*)$", (ROOT / "export/targets/README.md").read_text(encoding="utf-8"), re.MULTILINE)
    whole = (pages / "deploy/targets.md").read_text(encoding="utf-8")
    browser = (pages / "deploy/browser.md").read_text(encoding="utf-8")
    assert {"Browser", "Any runtime"} <= set(headings)
    assert "## Any runtime" in whole
    assert "## Browser" not in whole
    assert "\n# Browser" in browser


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("<!-- twins attention.py attention_heights -->", "defines no attention_heights"),
        ("<!-- twins attention.py -->", "no such directive"),
        ("<!-- picture cat -->", "no such directive"),
        ("<!-- figure first one -->", "no such directive"),
        ("<!-- figure 18 -->", "no such directive"),
    ],
)
def test_a_comment_that_stands_for_nothing_is_an_error(line: str, said: str) -> None:
    with pytest.raises(Problem, match=said):
        expand(line, ROOT, {}, lambda file, symbol, label: label)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("[a](../nowhere.md)", "leads nowhere"),
        ("[a](../../tests/docs)", "the site has no such page"),
        ("[a](tokens.md#no-heading)", "the site has no such page"),
        ("[`a`](../../export/nn/norms.py#a)", "defines no a"),
        ('<img src="no.png" alt="a">', "no such picture"),
    ],
)
def test_a_link_that_leads_nowhere_is_an_error(tmp_path: Path, line: str, said: str) -> None:
    for file in ROOT.iterdir():
        if file.name != "docs" and not file.name.startswith("."):
            (tmp_path / file.name).symlink_to(file)
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    (tmp_path / "docs/guide/text.md").write_text(f"# Text\n\n{line}\n")
    with pytest.raises(Problem, match=said):
        Build(tmp_path, tmp_path / "out").write()


def test_slugs_are_githubs() -> None:
    assert slug("Adapters: LoRA and DoRA") == "adapters-lora-and-dora"
    assert slug("`int8`, a scale a token") == "int8-a-scale-a-token"


HEAD = '<html><head><link rel="stylesheet" href="{css}"><link rel="canonical" href="https://a.b/"></head>'


def site_of(folder: Path, body: str, css: str = "a.css") -> Path:
    (folder / "sub").mkdir()
    (folder / "index.html").write_text(HEAD.format(css=css) + f"<body id=top>{body}</body></html>")
    (folder / "sub/page.html").write_text('<body><h1 id="here">x</h1><a href="../index.html#top">up</a></body>')
    (folder / "a.css").write_text("p { color: red; background: url(a.svg) }")
    return folder


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ('<a href="sub/page.html#here">x</a><a href="https://other.org/">y</a><a href="#top">z</a>', None),
        ('<a href="sub/other.html">x</a>', "index.html: sub/other.html: no such file"),
        ('<a href="sub/page.html#there">x</a>', "index.html: sub/page.html#there: no such place in it"),
        ('<img src="missing.png">', "index.html: missing.png: no such file"),
        ('<script src="https://cdn.org/x.js"></script>', "index.html: fetches https://cdn.org/x.js"),
        ('<img src="//cdn.org/x.png">', "index.html: fetches //cdn.org/x.png"),
    ],
)
def test_faults_of_a_built_site_are_seen(tmp_path: Path, body: str, said: str | None) -> None:
    assert problems(site_of(tmp_path, body)) == ([] if said is None else [said])


def test_styles_from_another_host_are_seen(tmp_path: Path) -> None:
    site = site_of(tmp_path, "")
    (site / "a.css").write_text("@import 'https://fonts.org/a.css'; p { background: url(https://b.org/x.png) }")
    assert problems(site) == ["a.css: fetches https://fonts.org/a.css", "a.css: fetches https://b.org/x.png"]


def test_the_search_in_files_is_our_own(tmp_path: Path) -> None:
    site = site_of(tmp_path, f'<script src="{SHIM}"></script>')
    (site / "sub/page.html").write_text(f'<script src="{SHIM}"></script>')
    shutil.copyfile(ROOT / "docs" / OWN_SHIM, site / OWN_SHIM)
    assert len(problems(site)) == 2
    finish(site)
    assert problems(site) == []
    assert f'src="../{OWN_SHIM}"' in (site / "sub/page.html").read_text(encoding="utf-8")


def test_no_link_and_no_head_is_without_words(tmp_path: Path) -> None:
    line = '<a id="__codelineno-0-7" name="__codelineno-0-7" href="#__codelineno-0-7"></a>'
    site = site_of(tmp_path, f'{line}<a href="#__codelineno-0-7">x</a><table><th style="a"></th><th>b</th></table>')
    finish(site)
    text = (site / "index.html").read_text(encoding="utf-8")
    assert line not in text
    assert '<td style="a"></td><th>b</th>' in text
    assert problems(site) == []
