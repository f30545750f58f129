"""The pages of the documentation, and the check of the site that is built from them.

python -m assemble pages OUT [FIGURES]     write OUT/zensical.toml and OUT/pages
python -m assemble check SITE              finish the site that was built, and check its links and assets
"""

from __future__ import annotations

import sys
from pathlib import Path

from .build import Build
from .built import finish, problems
from .figures import draw
from .problem import Problem

ROOT = Path(__file__).resolve().parents[2]


def main(command: str, folder: str, *figures: str) -> int:
    path = Path(folder).resolve()
    if command == "pages":
        try:
            path.mkdir(parents=True, exist_ok=True)
            Build(ROOT, path, Path(figures[0]).resolve() if figures else draw(ROOT, path / "figures")).write()
        except Problem as problem:
            print(problem, file=sys.stderr)
            return 1
        return 0
    finish(path)
    found = problems(path)
    for line in found:
        print(line, file=sys.stderr)
    pages = len(list(path.rglob("*.html")))
    print(f"{path}: {pages} pages, " + (f"{len(found)} faults" if found else "every link leads somewhere"))
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
