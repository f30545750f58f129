"""web: a page that runs exported models in the browser."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def web(
    models: Annotated[
        list[Path],
        typer.Argument(help="Folders that `export --target web` wrote, and files with the search (--search)."),
    ],
    out: Annotated[Path, typer.Option(help="The folder to write; any web server can host it.")] = Path("site"),
    title: Annotated[
        str | None, typer.Option(help="Heading of the page.", show_default="the first model's name")
    ] = None,
    assets: Annotated[
        Path | None,
        typer.Option(
            help="A node_modules with onnxruntime-web.",
            show_default="that of this folder, else the pinned version by npm",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace another site that OUT holds.")] = False,
    no_verify: Annotated[
        bool, typer.Option("--no-verify", help="Do not compare the models with the digests in their manifests.")
    ] = False,
) -> None:
    """Write a static page that translates in the browser, with onnxruntime-web, on WebGPU or wasm."""
    from export.web import write_site

    write_site(models, out, title=title, assets=assets, force=force, verify=not no_verify, told=print)
    files = [path for path in out.rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in files)
    print(f"{out}: {len(files)} files, {size / 1e6:.1f} MB; see it: mlx-transformer serve --web {out}")
