"""The code blocks of the README and of the pages it links to, run in their order in one folder."""

import json
import re
import shutil
import subprocess
import sys
import tomllib

import pytest
from documents import Block, Reader, blocks
from imports import ROOT, imports_of, modules
from small_models import SIZES, random_weights, write_text_model

import mlx_transformer
from export import OnnxTransformer
from export.package import export_onnx
from mlx_transformer.commands import quickstart
from mlx_transformer.core.checkpoint import save_checkpoint
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.text.tokenizer import Tokenizer

README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = ["README.md", *dict.fromkeys(re.findall(r"\]\((\w+/[\w/]+/README\.md)", README))]
"""In the order in which the README leads to them."""
TEXT = {page: (ROOT / page).read_text(encoding="utf-8") for page in PAGES}
BLOCKS = [block for text in TEXT.values() for block in blocks(text)]
# Blocks of shell with one of these take minutes, or a model that was trained.
LONG = re.compile(r"^make |mlx-transformer (train|distil)|-- train|--gate-source|assert_equal", re.MULTILINE)
RUN = [block for block in BLOCKS if block.kind in ("sh", "python")]
FIRST = [block for page in PAGES for block in blocks(TEXT[page]) if page == "README.md" or block.kind == "python"]
FIRST += [block for block in RUN if "--embed-tokenizer" in block.code]
"""Of the README, and of Python on every page, with the file that one of them opens."""
SHORT = [block for block in RUN if block in FIRST and not LONG.search(block.code)]


def check(block: Block, printed: str) -> None:
    """What a block says it prints, as far as that is the same for every model."""
    if block.code.count("print(") or "curl" in block.code:
        assert printed.strip(), block
    if "localhost" in block.code:
        answer, end = json.JSONDecoder().raw_decode(printed)
        assert answer.keys() == {"translations"}
        assert len(answer["translations"]) == 2
        assert printed[end:].startswith("data: {"), printed


def read(reader: Reader, chosen: list[Block]) -> None:
    if any(shutil.which(program) is None for program in ("bash", "curl", "make")):
        pytest.skip("needs bash, curl and make")
    try:
        for block in chosen:
            check(block, reader.run(block))
    finally:
        reader.leave()


@pytest.mark.parametrize("page", ["README.md", "docs/guide/export.md", "export/__init__.py"])
def test_what_builds_the_graphs_is_named(page):
    """The packages that the twins of the network import, each of them and no other of their kind."""
    twins = {name: path for name, path in modules().items() if name.startswith("export.nn.")}
    found = {
        entry.target.partition(".")[0]
        for name, path in twins.items()
        for entry in imports_of(path.read_text(encoding="utf-8"), name)
    }
    text = (ROOT / page).read_text(encoding="utf-8")
    said = re.search(r"NumPy,\s+(\w+) and (\w+)[:,]|built\*, with\s+(\w+) and (\w+):", text)
    assert said is not None
    assert {word for word in said.groups() if word} == {name for name in found if name.startswith("onnx")}


def test_every_block_is_of_a_kind_that_is_run_or_is_no_code():
    """`js` is run by the consumers' tests, `toml` compared by those of recipes."""
    assert {block.kind for block in BLOCKS} == {"sh", "python", "js", "text", "toml"}
    for block in BLOCKS:
        if block.kind == "text":
            assert not re.search(r"^(\$|make|curl|\.venv|import|from) ", block.code, re.MULTILINE), block


def test_the_readme_leads_to_every_page_and_can_be_read_at_once():
    files = [path for top in ("export", "mlx_transformer", "docs/claims") for path in (ROOT / top).rglob("*.md")]
    assert {path.relative_to(ROOT).as_posix() for path in files} == set(PAGES[1:])
    assert len(README.splitlines()) <= 90


def test_its_pictures_are_there_and_small():
    shown = re.findall(r'<img src="([^"]+)"', README)
    assert sorted(shown) == sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs/pictures").glob("*.*"))
    for name in shown:
        data = (ROOT / name).read_bytes()
        assert data.startswith(b"\x89PNG")
        assert len(data) < 150_000


def test_blocks_without_training(tmp_path):
    """On random weights in the places of the trained models; every block is run by `make test-slow`."""
    reader = Reader(tmp_path, at_once=True)
    for run in ("quickstart", "runs/mine"):
        write_text_model(tmp_path / run, max_positions=128)
    assert len(SHORT) >= 7
    read(reader, SHORT)
    assert (tmp_path / "runs/smollm/config.json").exists()


@pytest.mark.slow
def test_all_blocks(tmp_path):
    """From nothing, as a reader would: quickstart, training, export, proof, and all that follows."""
    reader = Reader(tmp_path)
    reader.write_texts()
    read(reader, RUN)
    for model in ("multi30k/model", "opus-en-de", "mine-hf"):
        assert (tmp_path / "runs" / model / "config.json").exists()
    assert (tmp_path / "runs/en-pt-marian/vocab.spm").exists()
    for page in quickstart.PAGES:
        assert (tmp_path / "quickstart/report" / page).read_text(encoding="utf-8").startswith("<!DOCTYPE html>")


def test_example_of_the_package():
    """It is the README's."""
    code = mlx_transformer.__doc__.partition("\n\n")[2]
    assert code.replace("\n", "").strip() in [block.code.replace("\n", "") for block in BLOCKS]


def test_extras_that_are_named_exist():
    named = set(
        re.findall(
            r"pip install (?:-e )?['\"](?:\.|mlx-transformer|\$\(ls dist/\*\.whl\))\[(\w+)\]['\"]",
            "".join(TEXT.values()),
        )
    )
    assert named >= {"serve", "text", "all"}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert named <= project["optional-dependencies"].keys()


def test_onnxruntime_alone(tmp_path):
    code = next(block.code for block in BLOCKS if block.kind == "python" and "import tokenizers" in block.code)
    assert not re.search(r"mlx_transformer|export", code)
    tokenizer = Tokenizer.train(["May 3, 2024", "3. Mai 2024"], 300)
    sizes = {**SIZES, "vocab_size": tokenizer.vocab_size, "max_positions": 128}
    config = TransformerConfig(**sizes, tie_embeddings="none", output_bias=True)
    weights = random_weights(config)
    # The lines ban nothing, ours does; and an end is to come, but not at once.
    weights["output_proj.bias"][[config.pad_id, config.bos_id]] = -100
    save_checkpoint(tmp_path / "model", config, weights, tokenizer.to_json())
    export_onnx(tmp_path / "model", tmp_path / "onnx")
    expected = OnnxTransformer(tmp_path / "onnx").translate(["May 3, 2024"], max_new_tokens=99)
    assert len(set(expected[0])) > 5
    assert code.count("quickstart/onnx") == 1
    code = code.replace("quickstart/onnx", (tmp_path / "onnx").as_posix())
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    assert done.stdout == expected[0] + "\n"
