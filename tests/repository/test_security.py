"""What SECURITY.md promises of the code: nothing that is read is run."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys

import pytest
from imports import ROOT, imports_of, modules

RUNS_WHAT_IT_READS = {"pickle", "cPickle", "marshal", "shelve", "dill", "joblib", "cloudpickle", "torch", "yaml"}
OF_THE_ORIGINAL = ("export.validate.origin.hugging_face", "torch")
"""`validate --against transformers` runs that package by wish; it reads safetensors there and nothing else."""
BUILTINS = {"eval", "exec", "compile", "__import__"}
KEYWORDS = {"allow_pickle", "trust_remote_code", "shell"}
WORDS = re.compile(rf"\b({'|'.join(sorted(BUILTINS | KEYWORDS | RUNS_WHAT_IT_READS))})\b")


def calls(source: str) -> set[str]:
    """Names of the functions that are called by their bare names, and keywords that allow a pickle."""
    tree = ast.parse(source)
    found = {n.func.id for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg in KEYWORDS:
            found |= {node.arg} if not (isinstance(node.value, ast.Constant) and node.value.value is False) else set()
    return found


def test_no_module_runs_what_it_reads():
    found = []
    for name, path in modules().items():
        source = path.read_text(encoding="utf-8")
        if not WORDS.search(source):  # to read it takes long
            continue
        found += [(name, call) for call in calls(source) & (BUILTINS | KEYWORDS)]
        tops = {entry.target.partition(".")[0] for entry in imports_of(source, name)}
        found += [(name, top) for top in tops & RUNS_WHAT_IT_READS]
    assert found == [OF_THE_ORIGINAL]
    assert "use_safetensors=True" in modules()[OF_THE_ORIGINAL[0]].read_text(encoding="utf-8")


def test_such_calls_are_seen():
    assert calls("mx.eval(x)\nre.compile('a')\nnumpy.load(f, allow_pickle=False)") == set()
    source = "eval(x)\nnumpy.load(f, allow_pickle=y)\nrun(c, shell=True)"
    assert calls(source) == {"eval", "run", "allow_pickle", "shell"}


def test_the_policy_is_where_people_look():
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    assert "## How to report" in text
    assert "make audit" in text


@pytest.mark.parametrize(("given", "expected"), [(None, "1"), ("0", "0")])
def test_nothing_is_reported_unless_it_is_asked_for(given, expected):
    """Before ONNX Runtime is imported by anybody."""
    variables = {name: value for name, value in os.environ.items() if name != "ORT_DISABLE_TELEMETRY"}
    variables |= {} if given is None else {"ORT_DISABLE_TELEMETRY": given}
    code = "import export, os, sys; assert 'onnxruntime' not in sys.modules; print(os.environ['ORT_DISABLE_TELEMETRY'])"
    done = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == expected
