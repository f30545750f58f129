"""Which runtimes this machine has, for tests that run on all of them without being asked.

The CPU always. Metal, CUDA and other execution providers where they are; with REQUIRE_CUDA=1 (`make test-cuda`) CUDA's
whether they are there or not, so that a machine without them fails.
"""

import os

import numpy as np
import onnx
import onnxruntime as ort

# In onnxruntime's wheels, but not tested: Azure's sends requests to a cloud, Core ML's default format isn't float32.
NOT_JUDGED = {"CPUExecutionProvider", "AzureExecutionProvider", "CoreMLExecutionProvider"}
NAMES = {"CUDAExecutionProvider": "cuda"}

ON_CPU = [
    "mlx:cpu",
    "onnxruntime:cpu:all",
    "onnxruntime:cpu:extended",
    "onnxruntime:cpu:basic",
    "onnxruntime:cpu:none",
    "evaluator",
    "reference",
]
ON_CUDA = ["mlx:gpu", "onnxruntime:cuda:all", "onnxruntime:cuda:none"]
LOWER_ON_CPU = ["mlx:cpu:float16", "mlx:cpu:bfloat16"]
LOWER_ON_GPU = ["mlx:gpu:float16", "mlx:gpu:bfloat16"]


def cuda_required() -> bool:
    return os.environ.get("REQUIRE_CUDA") == "1"


def mlx_gpu() -> bool:
    """Metal or CUDA."""
    try:
        import mlx.core as mx
    except ImportError:
        return False
    return mx.is_available(mx.Device(mx.gpu))


def providers() -> list[str]:
    """Execution providers other than the CPU's that really load, by the names that `--runtimes` takes."""
    available = [
        provider for provider in ort.get_available_providers() if provider not in NOT_JUDGED and _loads(provider)
    ]
    return [NAMES.get(provider, provider) for provider in available]


def unasked() -> list[str]:
    """Those that `validate` judges without being asked, in its order."""
    return ["mlx", "onnxruntime", *["mlx:gpu"] * mlx_gpu()]


def strict() -> list[str]:
    """Everything here that computes in float32."""
    gpu = ["mlx:gpu"] if mlx_gpu() else []
    others = [f"onnxruntime:{provider}:{level}" for provider in providers() for level in ("all", "none")]
    required = ON_CUDA if cuda_required() else []
    return list(dict.fromkeys([*ON_CPU, *gpu, *others, *required]))


def lower() -> list[str]:
    """Everything here that computes in float16, bfloat16 or TF32, as long as one process can."""
    gpu = LOWER_ON_GPU if mlx_gpu() or cuda_required() else []
    tf32 = ["onnxruntime:cuda:all:tf32"] if "cuda" in providers() or cuda_required() else []
    return [*LOWER_ON_CPU, *gpu, *tf32]


def _loads(provider: str) -> bool:
    value = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1])
    result = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [1])
    node = onnx.helper.make_node("Neg", ["x"], ["y"])
    graph = onnx.helper.make_graph([node], "one", [value], [result])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)], ir_version=9)
    options = ort.SessionOptions()
    options.log_severity_level = 4
    try:
        session = ort.InferenceSession(model.SerializeToString(), options, providers=[provider])
        session.run(None, {"x": np.ones(1, np.float32)})
    except Exception:  # onnxruntime's exceptions have no common base
        return False
    return provider in session.get_providers()
