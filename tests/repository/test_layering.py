"""Who may import whom: read from the syntax tree of every module, then proved by importing with packages blocked.

    spec <- data <- training        spec <- generation (any array namespace) <- with_mlx (MLX)
    spec, data, generation <- export (NumPy, onnx; ONNX Runtime only in the runtimes and validate)

The two sides meet only in the command line (`JOINTS`) and in the MLX engine of `export.validate`.
"""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from imports import PACKAGES, ROOT, Import, imports_of, modules
from random_models import write_model
from small_models import encoder_decoder
from waiting import PATIENCE

MLX = ("mlx",)
ONNX = ("onnx", "onnx_ir", "onnxscript")
RUNTIME = ("onnxruntime",)
OUR_ONNX_SIDE = ("export",)
# The one place that joins both sides.
JOINTS = ("mlx_transformer.cli", "mlx_transformer.commands")
OUR_JOINT = "export.__main__"  # the same commands
# What help is made of: names and settings, imported in no time.
TABLES = ("export.settings", "export.precision.table", "export.targets.names")


@dataclass(frozen=True)
class Rule:
    """For modules under `scope`, except those under `apart`: `never` is banned; of ours, only `ours` if given."""

    scope: tuple[str, ...]
    never: tuple[str, ...] = ()
    ours: tuple[str, ...] | None = None
    apart: tuple[str, ...] = ()
    # What is allowed inside functions only, in addition to `ours` and in spite of `never`.
    lazily: tuple[str, ...] = ()


SPEC, DATA, GENERATION = "mlx_transformer.spec", "mlx_transformer.data", "mlx_transformer.generation"
SCORING, DEVICE = "mlx_transformer.scoring", "mlx_transformer.device"
COMPARE, CHART = "mlx_transformer.compare", "mlx_transformer.report.chart"
WITH_MLX = "mlx_transformer.generation.with_mlx"
ENGINES = (
    "export.validate.engines",
    "export.validate.locate.isolate_mlx",
    "export.validate.checks.gradients",
    "export.validate.checks.structure",
)

RULES = (
    Rule((SPEC,), never=MLX + ONNX + RUNTIME, ours=(SPEC,)),
    Rule((DATA,), never=MLX + ONNX + RUNTIME, ours=(SPEC, DATA)),
    Rule((GENERATION,), never=(*MLX, *ONNX, *RUNTIME, WITH_MLX), ours=(SPEC, DATA, GENERATION), apart=(WITH_MLX,)),
    # It is handed what opens a model, in a process of its own.
    Rule((COMPARE,), never=(*MLX, *ONNX, *RUNTIME, WITH_MLX), ours=(SPEC, COMPARE, CHART)),
    Rule((WITH_MLX,), never=ONNX + RUNTIME, ours=(SPEC, DATA, GENERATION, "mlx_transformer.device")),
    Rule(
        ("mlx_transformer.nn",),
        never=("mlx_transformer.training", "mlx_transformer.convert", *JOINTS),
    ),
    # Everything of ours on the MLX side but the command line.
    Rule(("mlx_transformer",), never=ONNX + RUNTIME + OUR_ONNX_SIDE, apart=JOINTS),
    # The command line answers --help, and serves the ONNX side, on a machine without MLX.
    Rule((*JOINTS, OUR_JOINT), never=ONNX + RUNTIME),
    Rule(JOINTS, never=MLX, lazily=MLX),
    Rule(JOINTS, ours=("mlx_transformer", *TABLES), lazily=OUR_ONNX_SIDE),
    Rule((OUR_JOINT,), ours=(SPEC,), lazily=JOINTS),
    Rule(TABLES, never=MLX + ONNX + RUNTIME, ours=(SPEC, *TABLES)),
    # The package itself resolves its names on first use.
    Rule(("mlx_transformer.__init__",), never=MLX, ours=(SPEC,), lazily=("mlx_transformer",)),
    Rule(
        ("export",),
        never=(*MLX, WITH_MLX),
        ours=(SPEC, DATA, GENERATION, SCORING, "export"),
        apart=(*ENGINES, OUR_JOINT),
    ),
    Rule(
        ENGINES,
        never=(*MLX, WITH_MLX),
        ours=(SPEC, DATA, GENERATION, "export"),
        lazily=(*MLX, "mlx_transformer"),
    ),
    Rule(
        ("export",),
        never=RUNTIME,
        apart=(
            "export.runtime.sessions",
            "export.runtime.transformer",
            "export.targets.cpu.runtime",
            "export.search.runtime",
            "export.validate",
        ),
    ),
)


def under(name: str, prefixes: tuple[str, ...]) -> bool:
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


def violations(module: str, found: list[Import]) -> list[str]:
    """One line for each import that a rule forbids."""
    problems = []
    for rule in RULES:
        if not under(module, rule.scope) or under(module, rule.apart):
            continue
        for entry in found:
            if entry.lazy and under(entry.target, rule.lazily):
                continue
            ours = under(entry.target, PACKAGES) and entry.target != "mlx_transformer.__version__"
            if under(entry.target, rule.never):
                reason = f"{'/'.join(rule.scope)} never imports {'/'.join(rule.never)}"
            elif rule.lazily and not entry.lazy and under(entry.target, rule.lazily) and not under_ours(entry, rule):
                reason = f"{'/'.join(rule.scope)} imports {'/'.join(rule.lazily)} inside functions only"
            elif rule.ours is not None and ours and not under_ours(entry, rule):
                reason = f"{'/'.join(rule.scope)} imports of ours only {'/'.join(rule.ours)}"
            else:
                continue
            problems.append(f"{module.replace('.', '/')}.py:{entry.line}: imports {entry.target}, but {reason}")
    return problems


def under_ours(entry: Import, rule: Rule) -> bool:
    return rule.ours is not None and under(entry.target, rule.ours)


@pytest.mark.parametrize("module", sorted(modules()))
def test_imports_only_what_its_layer_may(module: str) -> None:
    problems = violations(module, imports_of(modules()[module].read_text(encoding="utf-8"), module))
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("mlx_transformer.spec.config", "import mlx.core as mx"),
        ("mlx_transformer.spec.config", "from mlx import core"),
        ("mlx_transformer.spec.config", "def f():\n    import onnx"),
        ("mlx_transformer.spec.config", "from ..data import corpus"),
        ("mlx_transformer.spec.config", "from .. import load"),
        ("mlx_transformer.spec.__init__", "from ..nn.model import Transformer"),
        ("mlx_transformer.data.batches", "import mlx.nn"),
        ("mlx_transformer.data.batches", "import onnxruntime"),
        ("mlx_transformer.generation.beam", "import mlx.core as mx"),
        ("mlx_transformer.generation.beam", "def f():\n    from .with_mlx import generate"),
        ("mlx_transformer.generation.__init__", "from .with_mlx import generate"),
        ("mlx_transformer.generation.beam", "from ..nn import model"),
        ("mlx_transformer.compare.run", "def f():\n    from export import OnnxTransformer"),
        ("mlx_transformer.compare.page", "from mlx_transformer.report.runs import Curve"),
        ("mlx_transformer.generation.with_mlx", "import onnxruntime"),
        ("mlx_transformer.generation.with_mlx", "if TYPE_CHECKING:\n    from mlx_transformer.nn import Cache"),
        ("mlx_transformer.nn.model", "import onnx"),
        ("mlx_transformer.nn.model", "import importlib\nimportlib.import_module('export.nn.model')"),
        ("mlx_transformer.nn.model", "from ..training import trainer"),
        ("mlx_transformer.training.trainer", "def f():\n    import export"),
        ("mlx_transformer.training.trainer", "from onnxruntime import InferenceSession"),
        ("mlx_transformer.convert.family", "from export.nn.model import Transformer"),
        ("mlx_transformer.spec.config", "if TYPE_CHECKING:\n    import mlx.core as mx"),
        ("mlx_transformer.__init__", "from .nn import model"),
        ("mlx_transformer.__init__", "if TYPE_CHECKING:\n    pass\nelse:\n    from .nn import model"),
        ("mlx_transformer.__init__", "import mlx.core"),
        ("mlx_transformer.commands.text", "from export import export_onnx"),
        ("mlx_transformer.cli", "import mlx.core as mx"),
        ("mlx_transformer.cli", "def f():\n    import onnxruntime"),
        ("export.nn.model", "import mlx.core as mx"),
        ("export.nn.model", "def f():\n    import mlx_transformer"),
        ("export.nn.model", "from mlx_transformer import nn"),
        ("export.nn.model", "from mlx_transformer.generation.with_mlx import generate"),
        ("export.nn.model", "from mlx_transformer.generation import with_mlx"),
        ("export.nn.model", "import onnxruntime"),
        ("export.__init__", "def f():\n    import onnxruntime"),
        ("export.runtime.transformer", "import mlx"),
        ("export.validate.report.data", "def f():\n    import mlx_transformer"),
        ("export.validate.engines.mlx", "import mlx_transformer"),
        ("export.validate.engines.mlx", "import mlx.core as mx"),
    ],
)
def test_forbidden_import_is_seen(module: str, line: str) -> None:
    assert violations(module, imports_of(line, module))


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("mlx_transformer.spec.config", "from .errors import UserError\nimport numpy"),
        ("mlx_transformer.data.batches", "from ..spec import tokenizer"),
        ("mlx_transformer.generation.with_mlx", "import mlx.core as mx\nfrom .search import beam"),
        ("mlx_transformer.nn.model", "def f():\n    from ..generation.with_mlx import generate"),
        ("mlx_transformer.training.trainer", "from .. import nn, data\nimport mlx.optimizers"),
        ("mlx_transformer.__init__", "def __getattr__(name):\n    from .nn import model"),
        ("mlx_transformer.__init__", "if TYPE_CHECKING:\n    from .nn import model"),
        ("mlx_transformer.cli", "def f():\n    from export import export_onnx"),
        ("export.nn.model", "import onnxscript.nn\nfrom mlx_transformer.spec.config import TransformerConfig"),
        ("export.runtime.transformer", "import onnxruntime\nfrom mlx_transformer.generation.beam import search"),
        ("export.runtime.transformer", "from mlx_transformer import __version__"),
        ("export.validate.run", "import onnxruntime"),
        ("export.validate.engines.mlx", "def f():\n    import mlx.core\n    import mlx_transformer"),
    ],
)
def test_allowed_import_passes(module: str, line: str) -> None:
    assert not violations(module, imports_of(line, module))


BLOCK = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ImportError(f"{{name}} is blocked")

sys.meta_path.insert(0, Blocked())
"""


def run_python(source: str) -> str:
    """Run in a fresh interpreter, return what it printed; its traceback is the failure message."""
    done = subprocess.run([sys.executable, "-c", source], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    return done.stdout


def importable(prefix: str, apart: tuple[str, ...] = ()) -> list[str]:
    """Modules under `prefix` in import form, without entry points that run when imported."""
    names = [name for name in modules() if under(name, (prefix,)) and not under(name, apart)]
    return [name.removesuffix(".__init__") for name in names if not name.endswith(".__main__")]


def test_importing_the_package_loads_neither_side() -> None:
    loaded = run_python("import sys, mlx_transformer; print(*sys.modules)").split()
    assert "mlx_transformer" in loaded
    assert not {name.partition(".")[0] for name in loaded} & {*MLX, *ONNX, *RUNTIME, "export"}


def test_shared_layers_import_without_mlx_and_onnx() -> None:
    names = importable(SPEC) + importable(DATA) + importable(COMPARE) + importable(GENERATION, apart=(WITH_MLX,))
    blocked = {*MLX, *ONNX, *RUNTIME, "export"}
    run_python(BLOCK.format(blocked=blocked) + f"import importlib\nfor name in {names}: importlib.import_module(name)")


def test_command_line_imports_without_mlx_and_onnx() -> None:
    names = [*(name for joint in JOINTS for name in importable(joint)), *TABLES]
    blocked = {*MLX, *ONNX, *RUNTIME}
    run_python(BLOCK.format(blocked=blocked) + f"import importlib\nfor name in {names}: importlib.import_module(name)")


def test_export_imports_without_mlx_and_loads_no_runtime() -> None:
    loaded = run_python(BLOCK.format(blocked={"mlx"}) + "import export; print(*sys.modules)").split()
    assert "export" in loaded
    assert "onnxruntime" not in loaded


def test_every_export_module_imports_without_mlx() -> None:
    names = importable("export")
    run_python(BLOCK.format(blocked={"mlx"}) + f"import importlib\nfor name in {names}: importlib.import_module(name)")


def test_running_on_ids_needs_neither_onnx_nor_a_tokenizer() -> None:
    """What builds graphs takes as much memory as a small model; what reads weights and text, a sixth of that."""
    blocked = {*MLX, *ONNX, "tokenizers", "safetensors"}
    run_python(BLOCK.format(blocked=blocked) + "from export import OnnxTransformer, SearchModel")


@pytest.mark.parametrize(("target", "shape"), [("portable", None), ("cpu", None), ("coreml", "1x8x8")])
def test_a_folder_runs_without_onnx(target: str, shape: str | None, tmp_path: Path) -> None:
    _, folder = write_model(encoder_decoder("paper"), tmp_path, target=target, fixed_shape=shape)
    run = f"from export import OnnxTransformer\nprint(OnnxTransformer({str(folder)!r}, threads=1).generate([[5, 2]]))"
    assert run_python(BLOCK.format(blocked={*MLX, *ONNX, "tokenizers", "safetensors"}) + run).startswith("[[")


def test_no_graph_needs_sympy(tmp_path: Path) -> None:
    """onnx_ir has it for dimensions that are expressions. Who makes one, or imports sympy as such, gets it."""
    checkpoint, _ = write_model(encoder_decoder("paper"), tmp_path)
    loaded = run_python(
        "import sys\n"
        "import export.validate.assertion\n"
        "from export import export_onnx, export_search\n"
        f"export_onnx({str(checkpoint)!r}, {str(tmp_path / 'int8')!r}, precision='int8')\n"
        f"export_search({str(checkpoint)!r}, {str(tmp_path / 'one.onnx')!r})\n"
        "print(sum(name.startswith('sympy.') for name in sys.modules))\n"
        "import onnx_ir, sympy\n"
        "print(onnx_ir.SymbolicDim('length') + 1)\n"
        "print(sympy.Symbol('x') * 2)\n"
    )
    assert loaded.splitlines() == ["0", "length + 1", "2*x"]


def test_the_block_blocks() -> None:
    """Guards the tests above: with the finder in place, MLX and onnx cannot be imported."""
    source = BLOCK.format(blocked={"mlx", "onnx"}) + (
        "import importlib\n"
        "for name in ('mlx.core', 'onnx'):\n"
        "    try: importlib.import_module(name)\n"
        "    except ImportError as error: print(error)\n"
    )
    assert run_python(source).splitlines() == ["mlx is blocked", "onnx is blocked"]
