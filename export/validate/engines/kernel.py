"""Which kernel multiplies integers here: one that is exact, or one that holds sums of two products to 16 bits.

x86 processors without VNNI multiply unsigned by signed bytes and add two neighbouring products into 16 bits, which
can't hold 2 x 255 x 127: where weights use all 8 bits, that is another network than the one that was exported.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper

from export.graph.protos import all_nodes, inner_graphs

EXACT, SATURATING = "exact", "saturating (sums of two products in 16 bits)"


@cache
def integer_kernel(rows: int = 16, width: int = 64) -> str:
    """Multiply the largest bytes with ONNX Runtime on the CPU, and say which kernel it was."""
    dims = {"x": ["rows", width], "w": [width, width], "y": ["rows", width]}
    kinds = {"x": TensorProto.UINT8, "w": TensorProto.INT8, "y": TensorProto.INT32}
    x, _, y = (helper.make_tensor_value_info(name, kinds[name], dims[name]) for name in dims)
    w = helper.make_tensor("w", TensorProto.INT8, dims["w"], np.full(width * width, 127, np.int8))
    graph = helper.make_graph([helper.make_node("MatMulInteger", ["x", "w"], ["y"])], "kernel", [x], [y], [w])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    onnx.checker.check_model(model)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    sums = [session.run(None, {"x": np.full((n, width), 255, np.uint8)})[0] for n in (1, rows)]
    return EXACT if all(np.all(each == 255 * 127 * width) for each in sums) else SATURATING


def multiplies_within(file: Path) -> bool:
    """Return whether a graph multiplies integers within a branch or a loop, where ONNX Runtime has no exact kernel for
    processors that lack one (`session_options` in `export/runtime/sessions.py`)."""
    graph = onnx.load(file, load_external_data=False).graph
    inner = (node for outer in graph.node for part in inner_graphs(outer) for node in all_nodes(part))
    return any(node.op_type.startswith("MatMulInteger") for node in inner)
