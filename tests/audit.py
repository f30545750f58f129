"""The pinned dependencies against the database of known vulnerabilities: `make audit`.

    python tests/audit.py PIP_AUDIT CONSTRAINTS

Exit 0: none is known. 1: some are, in a table. 2: the database could not be asked, for which the network is needed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

OPTIONS = ["--no-deps", "--disable-pip", "--format", "json", "--progress-spinner", "off"]


def judged(dependencies: list[dict[str, Any]]) -> tuple[list[str], int]:
    """Lines to print and the exit status. dependencies: as pip-audit lists them."""
    compared = [one for one in dependencies if "skip_reason" not in one]
    if not compared:
        return [f"make audit needs the network: none of {len(dependencies)} packages was found in the database"], 2
    rows = [("package", "version", "vulnerability", "mended in")]
    for one in compared:
        for known in one["vulns"]:
            rows.append((one["name"], one["version"], known["id"], ", ".join(known["fix_versions"]) or "-"))
    skipped = [one["name"] for one in dependencies if "skip_reason" in one]
    end = f"{len(compared)} packages compared, {len({row[0] for row in rows[1:]})} with known vulnerabilities"
    lines = [end + (f"; not in the database: {', '.join(skipped)}" if skipped else "")]
    if len(rows) == 1:
        return lines, 0
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return [*table, *lines], 1


def main(program: str, constraints: str) -> int:
    done = subprocess.run([program, *OPTIONS, "-r", constraints], capture_output=True, text=True)
    try:
        lines, status = judged(json.loads(done.stdout)["dependencies"])
    except (ValueError, KeyError):
        said = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        lines, status = [f"make audit needs the network, and pip-audit could not ask ({said[:200]})"], 2
    print("\n".join(lines))
    return status


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
