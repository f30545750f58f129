"""A search in one file among given ids: what the other runtimes find."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from combined import combined
from listed_models import listed_inputs, write_listed
from marian_models import KINDS, write_model
from small_models import SIZES, encoder_decoder, write_text_model

from export import OnnxTransformer, SearchModel, export_onnx, export_search
from mlx_transformer import Transformer
from mlx_transformer.convert import import_marian
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.system.errors import UserError

MODELS = {
    "tied": TransformerConfig(**SIZES),
    "untied": encoder_decoder("untied"),
    "many words": TransformerConfig(**{**SIZES, "vocab_size": 16640}),
    "student": KINDS["student"],
}
CHOICES: dict[str, dict[str, Any]] = {
    "greedy": dict(beam=1),
    "beam": dict(beam=3, n_best=3),
    "rules": dict(
        beam=2,
        no_repeat_ngram=2,
        repetition_penalty=1.3,
        end_ids=(7,),
        suppressed=(9, 4),
        suppressed_first=(5,),
        banned_sequences=((11, 11), (8, 6), (3, 3, 3)),
    ),
    "forced": dict(beam=2, forced_first=(8,), forced_end=True, min_new_tokens=3),
    "drawn": dict(sample=True, top_k=5, seed=4),
}


HOW = [  # every other one is in make test
    ("portable", "float32"),
    ("cpu", "float32"),
    ("cpu", "int8"),
    ("portable", "int8"),
    ("portable", "int8-weights"),
    ("cpu", "int8-weights"),
]


@pytest.mark.slow
@pytest.mark.fast("('portable', 'float32')-tied")
@pytest.mark.parametrize(("how", "name"), combined(HOW, MODELS, step=3), ids=str)
def test_it_finds_what_a_folder_does(name: str, how: tuple[str, str], tmp_path: Path) -> None:
    place, (target, precision) = tmp_path, how
    checkpoint = write_listed(MODELS[name], tmp_path)
    more: dict[str, Any] = dict(target=target, precision=precision, accept_loss=True, force=True)
    more |= {"activations": "float32"} if precision == "int8-weights" else {}
    folder = OnnxTransformer(export_onnx(checkpoint, place / f"{target}-{precision}", **more), threads=1)
    file = SearchModel(export_search(checkpoint, place / f"{target}-{precision}.onnx", **more), threads=1)
    rows, own = listed_inputs(folder.config, 6)
    for options in CHOICES.values():
        options = {**options, "max_new_tokens": 10}
        expected = folder.search(rows, candidates=own, **options)
        found = file.search(rows, candidates=own, **options)
        assert [[h.ids for h in best] for best in found] == [[h.ids for h in best] for best in expected]
        if options.get("beam", 1) > 1:
            scores = [[h.score for best in each for h in best] for each in (found, expected)]
            np.testing.assert_allclose(*scores, rtol=1e-4, atol=1e-4)
        alone = [file.search([row], candidates=[ids], **options)[0] for row, ids in zip(rows, own, strict=True)]
        if not options.get("sample"):
            assert [[h.ids for h in best] for best in alone] == [[h.ids for h in best] for best in found]
    folder.shortlist = file.shortlist = None
    prefix = [[11, 12], [], [10], [], [], [13]]
    assert file.generate(rows, prefix, candidates=own) == folder.generate(rows, prefix, candidates=own)
    assert file.generate(rows) == folder.generate(rows)
    assert file.generate(rows, candidates=own) != file.generate(rows)


def test_a_shortlist_lies_beside_the_file(tmp_path: Path) -> None:
    import_marian(write_model(tmp_path / "marian", KINDS["student"], integers=True), tmp_path / "model")
    file = SearchModel(export_search(tmp_path / "model", tmp_path / "one.onnx"), threads=1)
    assert (tmp_path / "one.lex.50.50.test.s2t.bin").is_file()
    mlx, rows = Transformer.load(tmp_path / "model"), [[5, 4, 9, 0], [7, 0], [3, 12, 8, 6, 0]]
    listed = file.generate(rows)
    assert listed == mlx.generate(rows)
    assert file.translate(["the ate"]) == mlx.translate(["the ate"])
    mlx.shortlist = None
    file.use_shortlist("none")
    assert file.generate(rows) == mlx.generate(rows) != listed
    bare = SearchModel(export_search(tmp_path / "model", tmp_path / "bare.onnx", shortlist="none"), threads=1)
    assert bare.generate(rows) == mlx.generate(rows)
    assert [file.name for file in tmp_path.glob("bare*")] == ["bare.onnx"]


def test_wrong_candidates_are_one_line(tmp_path: Path) -> None:
    place = write_text_model(tmp_path)
    file = SearchModel(export_search(place / "model", tmp_path / "one.onnx"), threads=1)
    with pytest.raises(UserError, match=r"^candidates has 1 rows for 2 inputs: give one list for each$"):
        file.generate([[3, 2], [4, 2]], candidates=[[3]])
    with pytest.raises(UserError, match="source row 1: the rules ban all its candidates"):
        file.generate([[3, 2], [4, 2]], candidates=[[3, 5], [5]], beam=2, suppressed=(5,), min_new_tokens=2)
