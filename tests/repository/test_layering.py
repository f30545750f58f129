"""Who may import whom: read from the syntax tree of every module, then proved by importing with packages blocked.

Lists say it all: the order of the rooms, and of the rooms within `export/validate`, each of which imports only rooms
before it; and the rooms that may load a third-party package. The command line joins both sides, inside its functions.
"""

import subprocess
import sys
from pathlib import Path

import pytest
from imports import PACKAGES, ROOT, Import, imports_of, modules
from random_models import write_model
from small_models import encoder_decoder
from waiting import PATIENCE

MLX = ("mlx",)
ONNX = ("onnx", "onnx_ir", "onnxscript")
RUNTIME = ("onnxruntime",)

# A room imports only rooms before it, and itself. Names: a package, or a module beside the packages.
MLX_SIDE = ["page", "system", "core", "text", "device", "data", "decoding", "generation"]
MLX_SIDE += ["families", "nn", "runtime", "convert", "training", "report"]
SHARED = ["page", "system", "core", "text", "data", "decoding", "generation", "families"]
ONNX_SIDE = ["settings", "arguments", "nn", "interface", "graph", "precision", "targets"]
ONNX_SIDE += ["runtime", "package", "search", "web", "serve", "validate", "explain"]
# The same within export/validate, for imports inside functions too: a check is unknown to whatever it checks.
VALIDATE = ["rule", "reference", "points", "findings", "cases", "engines", "opening", "checks", "locate"]
VALIDATE += ["origin", "report", "compare"]
JOINTS = ("commands", "cli", "__main__")
# What help is made of: names and settings, imported in no time.
TABLES = ("export.settings",)
# Rooms, or modules of them, that may load a package of others'; those of LAZILY inside functions alone.
OWNERS = {
    MLX: (
        *("mlx_transformer." + room for room in ("nn", "runtime", "convert", "training", "device")),
        "export.validate.engines",
        "export.validate.checks.gradients",
    ),
    ONNX: tuple(
        f"export.{room}" for room in ("nn", "graph", "precision", "targets", "search", "package", "web", "validate")
    ),
    RUNTIME: (
        "export.runtime.sessions",
        "export.runtime.unpacking",
        "export.runtime.transformer",
        "export.targets.cpu.runtime",
        "export.targets.cpu.texts",
        "export.search.runtime",
        "export.validate",
    ),
}
LAZILY = {
    MLX: ("mlx_transformer.commands", "export.validate"),
    ONNX: ("export.validate.report", "export.explain"),
    RUNTIME: (),
}
# The one import of the MLX side from export: the engine that runs a model of it, inside functions.
OPENS_MLX = ("export.validate.engines", "export.validate.checks.gradients", "export.validate.checks.structure")


def under(name: str, prefixes: tuple[str, ...]) -> bool:
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


def room_of(name: str) -> tuple[str, str]:
    """mlx_transformer.nn.model -> (mlx_transformer, nn); the face of a package has the room \"\"."""
    package, _, rest = name.partition(".")
    room = rest.partition(".")[0]
    return package, "" if room == "__init__" else room


def violations(module: str, found: list[Import]) -> list[str]:
    """One line for each import that a list forbids."""
    problems = []
    for entry in found:
        if reason := _forbidden(module, entry):
            problems.append(f"{module.replace('.', '/')}.py:{entry.line}: imports {entry.target}, but {reason}")
    return problems


def _forbidden(module: str, entry: Import) -> str:
    """Why not, or nothing."""
    for packages, owners in OWNERS.items():
        if under(entry.target, packages):
            if under(module, owners) and not (packages == MLX and module.startswith("export.") and not entry.lazy):
                return ""
            if entry.lazy and under(module, LAZILY[packages]):
                return ""
            return f"{'/'.join(packages)} is loaded only by {', '.join(owners)}"
    if not under(entry.target, PACKAGES) or entry.target.endswith(".__version__"):
        return ""
    (package, room), (other_package, other) = room_of(module), room_of(entry.target)
    if room in JOINTS:
        shared = other_package == "mlx_transformer" or under(entry.target, TABLES)
        if package == "export":
            return "" if entry.lazy or other == "system" else "the entry point imports inside functions only"
        return "" if entry.lazy or shared else "the command line imports export inside functions only"
    if room == "":  # a face resolves its names on first use
        eager = other in ("system", "") or (package, other) == ("export", "graph")
        return "" if entry.lazy or eager else "a package's face imports inside functions only"
    if other in JOINTS:
        return "nobody imports the command line"
    if package == "mlx_transformer":
        order = MLX_SIDE
        if other_package == "export":
            return "the MLX side knows nothing of export"
    else:
        order = ONNX_SIDE
        if other_package == "mlx_transformer":
            if other in SHARED or (entry.lazy and under(module, OPENS_MLX)):
                return ""
            return f"export imports of mlx_transformer only {', '.join(SHARED)}"
    if room == other == "validate":
        order, room, other = VALIDATE, module.split(".")[2], entry.target.split(".")[2]
        if room == "__init__":  # the face
            return ""
    if other == "" or other not in order:
        return "it is no room in the order" if other else "nobody imports a face from inside"
    return "" if order.index(other) <= order.index(room) else f"{other} stands after {room}"


def test_every_module_imports_only_what_its_layer_may() -> None:
    problems = [
        problem
        for module, path in sorted(modules().items())
        for problem in violations(module, imports_of(path.read_text(encoding="utf-8"), module))
    ]
    assert not problems, "\n".join(problems)


def test_only_commands_that_write_a_page_import_the_teaching_pages() -> None:
    """Alignments and shortlists, say, don't."""
    users = {
        module
        for module, path in modules().items()
        for entry in imports_of(path.read_text(encoding="utf-8"), module)
        if under(entry.target, ("export.explain",)) and not under(module, ("export.explain",))
    }
    assert users == {f"mlx_transformer.commands.{name}" for name in ("exporting", "looking", "quickstart")}


def test_every_room_has_its_place() -> None:
    for package, order in (("mlx_transformer", MLX_SIDE), ("export", ONNX_SIDE)):
        rooms = {room_of(name)[1] for name in modules() if name.startswith(package)} - {"", *JOINTS, "recipes"}
        assert rooms == set(order)
    assert {name.split(".")[2] for name in modules() if under(name, ("export.validate",))} - {"__init__"} == {*VALIDATE}


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("mlx_transformer.core.config", "from mlx import core"),
        ("mlx_transformer.core.config", "if TYPE_CHECKING:\n    import mlx.core as mx"),
        ("mlx_transformer.core.config", "from .. import load"),
        ("mlx_transformer.system.files", "from ..core import config"),
        ("mlx_transformer.decoding.beam", "def f():\n    from ..runtime.decoding import generate"),
        ("mlx_transformer.nn.model", "import importlib\nimportlib.import_module('export.nn.model')"),
        ("mlx_transformer.__init__", "if TYPE_CHECKING:\n    pass\nelse:\n    from .nn import model"),
        ("mlx_transformer.cli", "def f():\n    import onnxruntime"),
        ("export.nn.model", "def f():\n    import mlx_transformer"),
        ("export.__init__", "def f():\n    import onnxruntime"),
        ("export.validate.report.data", "def f():\n    import mlx_transformer"),
        ("export.validate.engines.onnx_engine", "def f():\n    from export.validate.checks import int8"),
        ("export.validate.checks.structure", "from export.validate import Report"),
        ("export.validate.engines.mlx", "import mlx.core as mx"),
    ],
)
def test_forbidden_import_is_seen(module: str, line: str) -> None:
    assert violations(module, imports_of(line, module))


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


def importable(prefix: str) -> list[str]:
    """Modules under `prefix` in import form, without entry points that run when imported."""
    names = [name for name in modules() if under(name, (prefix,))]
    return [name.removesuffix(".__init__") for name in names if not name.endswith(".__main__")]


def test_importing_the_package_loads_neither_side() -> None:
    loaded = run_python("import sys, mlx_transformer; print(*sys.modules)").split()
    assert "mlx_transformer" in loaded
    assert not {name.partition(".")[0] for name in loaded} & {*MLX, *ONNX, *RUNTIME, "export"}


def test_shared_layers_and_the_command_line_import_without_mlx_and_onnx() -> None:
    """The shared rooms first, where `export` is blocked too."""
    shared = [name for room in (*SHARED, "report") for name in importable(f"mlx_transformer.{room}")]
    commands = [*importable("mlx_transformer.commands"), *importable("mlx_transformer.cli"), *TABLES]
    run_python(
        BLOCK.format(blocked={*MLX, *ONNX, *RUNTIME, "export"})
        + f"import importlib\nfor name in {shared}: importlib.import_module(name)\n"
        + BLOCK.format(blocked={*MLX, *ONNX, *RUNTIME})
        + f"del sys.meta_path[1]\nfor name in {commands}: importlib.import_module(name)"
    )


def test_validate_starts_without_what_builds_graphs() -> None:
    """A quarter of its start."""
    run_python(BLOCK.format(blocked={"onnxscript"}) + "import export.validate")


def test_every_export_module_imports_without_mlx_and_the_package_loads_no_runtime() -> None:
    loaded = run_python(
        BLOCK.format(blocked={"mlx"}) + "import importlib, export\nprint(*sys.modules)\n"
        f"for name in {importable('export')}: importlib.import_module(name)"
    ).split()
    assert "export" in loaded
    assert "onnxruntime" not in loaded


def test_folders_run_on_ids_without_onnx_and_a_tokenizer(tmp_path: Path) -> None:
    """What builds graphs takes as much memory as a small model; what reads weights and text, a sixth of that."""
    folders = [
        str(write_model(encoder_decoder("paper"), tmp_path / target, target=target)[1])
        for target in ("portable", "cpu")
    ]
    run = "from export import OnnxTransformer, SearchModel\n"
    run += f"for folder in {folders}: print(OnnxTransformer(folder, threads=1).generate([[5, 2]]))"
    blocked = {*MLX, *ONNX, "tokenizers", "safetensors", "concurrent"}  # the last is of several passes at a time
    written = run_python(BLOCK.format(blocked=blocked) + run).splitlines()
    assert [line.startswith("[[") for line in written] == [True, True]


def test_a_checkpoint_opens_without_what_takes_long_to_import(tmp_path: Path) -> None:
    checkpoint, _ = write_model(encoder_decoder("paper"), tmp_path)
    opened = f"import sys; from mlx_transformer import Transformer; Transformer.load({str(checkpoint)!r})"
    loaded = run_python(f"{opened}; print(*sys.modules)").split()
    assert not {"concurrent", "ml_dtypes", "safetensors.numpy", "scipy_openblas32", "tokenizers"} & {*loaded}


@pytest.mark.slow
def test_no_graph_needs_sympy(tmp_path: Path) -> None:
    """onnx_ir has it for dimensions that are expressions. Who makes one, or imports sympy as such, gets it."""
    checkpoint, _ = write_model(encoder_decoder("paper"), tmp_path)
    loaded = run_python(
        "import sys\n"
        "import export.validate.compare\n"
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
