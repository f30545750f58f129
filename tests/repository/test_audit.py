"""`make audit`: what is known is shown, and a database that was not asked is no good news."""

from __future__ import annotations

import importlib.util
import json

import pytest
from imports import ROOT

MODULE = importlib.util.spec_from_file_location("audit", ROOT / "tests" / "audit.py")
audit = importlib.util.module_from_spec(MODULE)
MODULE.loader.exec_module(audit)

GOOD = {"name": "numpy", "version": "2.3.0", "vulns": []}
BAD = {"name": "onnx", "version": "1.0", "vulns": [{"id": "PYSEC-1", "fix_versions": ["1.1", "2.0"]}]}
ABSENT = {"name": "ours", "skip_reason": "not found"}


@pytest.mark.parametrize(
    ("found", "status", "said"),
    [
        ([GOOD], 0, "1 packages compared, 0 with known vulnerabilities"),
        ([GOOD, ABSENT], 0, "1 packages compared, 0 with known vulnerabilities; not in the database: ours"),
        ([GOOD, BAD], 1, "2 packages compared, 1 with known vulnerabilities"),
        ([ABSENT], 2, "make audit needs the network: none of 1 packages was found in the database"),
    ],
)
def test_what_is_known(found, status, said):
    lines, found_status = audit.judged(found)
    assert (found_status, lines[-1]) == (status, said)
    assert any("PYSEC-1" in line and "1.1, 2.0" in line for line in lines) == (status == 1)


def test_without_network_it_is_one_line(tmp_path, capsys):
    program = tmp_path / "pip-audit"
    for answer, status in ((json.dumps({"dependencies": [BAD]}), 1), ("", 2)):
        program.write_text(f"#!/bin/sh\necho trying >&2\necho 'no route to host' >&2\necho '{answer}'\n")
        program.chmod(0o755)
        assert audit.main(str(program), "constraints.txt") == status
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == "make audit needs the network, and pip-audit could not ask (no route to host)"
