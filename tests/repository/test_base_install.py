"""`pip install mlx-transformer` without an extra: what it brings runs models, and what it doesn't is named."""

import re
import shutil
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import marian_folders
import pytest
from combined import thinned_rows
from small_models import encoder_decoder, random_weights
from without_mlx import without

import mlx_transformer
from export import export_onnx
from mlx_transformer import OnnxTransformer
from mlx_transformer.core.checkpoint import save_checkpoint
from mlx_transformer.core.folders import ONNX_CONFIG
from mlx_transformer.system.lazy import EXTRA_OF

ROOT = Path(__file__).resolve().parents[2]
OF_OTHER_EXTRAS = ("starlette", "uvicorn", "matplotlib", "pyarrow", "zstandard", "onnxruntime_extensions")
BASE = without(*EXTRA_OF, *OF_OTHER_EXTRAS)
ROWS = [[5, 6, 2], [7, 2], [*range(20, 30), 2]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A checkpoint, its ONNX folder."""
    folder = tmp_path_factory.mktemp("base")
    config = encoder_decoder("modern")
    save_checkpoint(folder / "model", config, random_weights(config))
    export_onnx(folder / "model", folder / "onnx")
    return folder


def run_script(script: str, cwd: Path, lacking: str = BASE) -> subprocess.CompletedProcess[str]:
    path = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
    return subprocess.run([sys.executable, "-c", path + lacking + script], cwd=cwd, capture_output=True, text=True)


def test_models_run(folders):
    expected = OnnxTransformer(folders / "onnx", threads=1).generate(ROWS, max_new_tokens=8)
    done = run_script(
        f"from mlx_transformer import OnnxTransformer\n"
        f"print(OnnxTransformer('onnx', threads=1).generate({ROWS}, max_new_tokens=8))",
        folders,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(expected)


def test_three_packages_are_enough(text_folder):
    """What docs/deploy.md says of `pip install --no-deps`."""
    least = {"numpy", "onnxruntime", "tokenizers", "mlx_transformer", "export"}
    others = without(*sorted(set(metadata.packages_distributions()) - least))
    verbs = "print([*model.stream('one', max_new_tokens=4)], model.translate(['one'], max_new_tokens=4))"
    done = run_script(f"import mlx_transformer as mt; model = mt.OnnxTransformer('onnx'); {verbs}", text_folder, others)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("arguments", "extra"),
    thinned_rows(
        [
            (["train", "quickstart", "--out", "run"], "train"),
            (["quickstart", "--out", "run"], "train,export"),
            (["translate", "model", "hello"], "train"),
            (["quantize", "model", "small"], "train"),
            (["export", "model", "other"], "export"),
            (["validate", "model", "onnx"], "export"),
            (["serve", "onnx"], "serve"),
        ],
        2,
    ),
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_a_command_names_its_extra(folders, arguments, extra):
    script = f"from mlx_transformer.cli import main\nsys.exit(main({arguments!r}))"
    done = run_script(script, folders)
    assert done.returncode == 2, done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert f"pip install -e '{ROOT}[{extra}]'" in done.stderr
    assert not (folders / "run").exists()


def test_a_name_of_the_package_names_its_extra(folders):
    done = run_script("import mlx_transformer\nmlx_transformer.load('model')", folders)
    assert f"needs MLX, which is not installed; pip install -e '{ROOT}[train]'" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("export('model', 'other')", "export needs onnx"),
        ("validate('model', 'onnx')", "validate needs onnx"),
    ],
)
def test_a_function_names_its_extra(text_folder, call, message):
    done = run_script(f"import mlx_transformer\nmlx_transformer.{call}", text_folder)
    assert done.stderr.splitlines()[-1].startswith(f"ModuleNotFoundError: {message}")
    assert done.stderr.rstrip().endswith(f"pip install -e '{ROOT}[export]'")


def test_what_installs_everywhere_brings_what_scores():
    """Export's extra has no part that is for few systems alone, such as MLX: it scores and judges precisions."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    brought = {re.split(r"[<>=\[; ]", line)[0] for line in project["optional-dependencies"]["export"]}
    assert {name for name, extra in EXTRA_OF.items() if extra == "export"} == {n.replace("-", "_") for n in brought}


def test_graphs_beside_published_weights_run(tmp_path):
    """As Optimum writes them; where MLX is, it computes the weights."""
    theirs = marian_folders.written(tmp_path)
    both = export_onnx(tmp_path / "ours", tmp_path / "both")
    expected = OnnxTransformer(both, threads=1).generate(ROWS, max_new_tokens=8)
    for name in (ONNX_CONFIG, "manifest.json"):
        (both / name).unlink()
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(theirs / name, both / name)
    assert isinstance(mlx_transformer.open_model(both), mlx_transformer.Transformer)
    opened = "mlx_transformer.open_model('both', threads=1)"
    done = run_script(f"import mlx_transformer; print({opened}.generate({ROWS}, max_new_tokens=8))", tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(expected)
