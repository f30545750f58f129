"""A student that is trained here, in seconds, and written for Mozilla's engine: it says what our files say."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from published import limit, peers
from tiny_student import train_student

from export import export_onnx
from export.validate.origin.marian import MarianNetwork
from mlx_transformer import Tokenizer, cli, open_model
from mlx_transformer.convert import import_marian
from mlx_transformer.core.shortlist import read_shortlist
from mlx_transformer.data import built_in
from mlx_transformer.families.marian_files.items import read_bin
from mlx_transformer.families.marian_files.options import parse_options

pytestmark = pytest.mark.consumers

COUNT = 60


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The student's files, with a shortlist that its attention has made."""
    folder = tmp_path_factory.mktemp("student")
    run, listed = str(train_student(folder / "run")), str(folder / "shortlist.bin")
    paths = folder / "source", folder / "target"
    built_in.build("cldr:en-de", train_pairs=3000, seed=1).train.write(*paths)
    cli.main(["shortlist", run, listed, "--source", str(paths[0]), "--reference", str(paths[1]), "--best", "10"])
    cli.main(["to-marian", run, str(folder / "marian"), "--shortlist", listed])
    return folder / "marian"


@pytest.fixture(scope="module")
def lines() -> list[str]:
    """Phrases, text with needless spaces, and with characters that the student has never seen."""
    phrases = built_in.build("cldr:en-de", train_pairs=3000, seed=1).held_out.source
    return [*dict.fromkeys(phrases[:COUNT]), "  two   words ", "漢字 and 🙂"]


@pytest.mark.parametrize("shortlist", [False, True], ids=["all pieces", "shortlist"])
def test_the_engine_says_what_the_integers_say(theirs: Path, lines: list[str], tmp_path: Path, shortlist: bool) -> None:
    vocabulary, model, file = theirs / "vocab.spm", theirs / "model.intgemm.alphas.bin", theirs / "lex.50.10.s2t.bin"
    task: dict[str, Any] = {"model": str(model), "source": str(vocabulary), "target": str(vocabulary), "lines": lines}
    (answer,) = peers([{**task, "shortlist": str(file) if shortlist else None}])["answers"]
    listed = read_shortlist(file)
    (tmp_path / "theirs").mkdir()
    for path in (vocabulary, model):  # without the settings, by which all searches would take the shortlist
        shutil.copy(path, tmp_path / "theirs")
    import_marian(tmp_path / "theirs", tmp_path / "ours")
    tokenizer = Tokenizer.load(tmp_path / "ours")
    *items, options = read_bin(model)
    network = MarianNetwork(
        {item.name: item for item in items},
        parse_options(options.text(), str(model)),
        "saturating" if answer["backend"] == "avx2" else "exact",
    )
    known = [i for i, line in enumerate(lines) if tokenizer.unk_id not in tokenizer.encode(line)]
    assert len(known) == len(lines) - 1
    for i in known:
        ids = tokenizer.encode(lines[i])
        among = listed.candidates(ids, len(listed.offsets) - 1, shared=True) if shortlist else None
        assert among is None or len(among) < 200
        assert tokenizer.decode(network.translate(ids, limit(ids), among)) == answer["texts"][i], lines[i]
    export_onnx(tmp_path / "ours", tmp_path / "onnx", precision="int8")
    runner = open_model(tmp_path / "onnx", shortlist=file if shortlist else None)
    ours = runner.translate([lines[i] for i in known])
    same = sum(text == answer["texts"][i] for text, i in zip(ours, known, strict=True))
    assert same >= 0.7 * len(known)  # exact integers choose another word now and then than the engine's 16 bits
