"""Prove two runtimes equal: weights, every named point of the network, logits, caches and generated tokens.

from export.validate import compare
report = compare("run/model", "run/onnx")
report.print()

In a test suite:

from export.validate import assert_equal
assert_equal("run/model", "run/onnx")  # AssertionError names the first failing point and the operation behind it
"""

from .compare import assert_equal, compare, compare_engines, runtime_names, validate_command
from .report import Report
from .rule import explain

__all__ = ["Report", "assert_equal", "compare", "compare_engines", "explain", "runtime_names", "validate_command"]
