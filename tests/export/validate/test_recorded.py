"""What a checkpoint was imported from is found again by what it says, or a line says why not."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from marian_models import SIZES, write_model
from published_folders import checkpoint

from export.validate.origin.check import recorded
from mlx_transformer import UserError
from mlx_transformer.convert import import_marian


def test_a_folder_of_transformers(tmp_path: Path) -> None:
    ours = checkpoint("m2m100", tmp_path / "a")
    assert recorded("transformers", ours) == (tmp_path / "a" / "theirs").resolve()
    shutil.move(tmp_path / "a", tmp_path / "b")  # both at once
    ours, theirs = tmp_path / "b" / "ours", tmp_path / "b" / "theirs"
    assert recorded("transformers", ours) == theirs.resolve()
    config = theirs / "config.json"
    config.write_text(config.read_text() + " ")
    with pytest.raises(UserError, match=r"config\.json is no longer what was imported: give --original, the file or"):
        recorded("transformers", ours)
    shutil.rmtree(theirs)
    with pytest.raises(UserError, match=r"--against transformers: .*, from which it was imported, is not there"):
        recorded("transformers", ours)
    with pytest.raises(UserError, match="--against marian: the checkpoint doesn't say what it was imported from"):
        recorded("marian", ours)


@pytest.mark.parametrize("integers", [True, False])
def test_a_file_of_marian(integers: bool, tmp_path: Path) -> None:
    file = write_model(tmp_path / "marian", SIZES, integers=integers)
    import_marian(file, tmp_path / "ours")
    found = recorded("marian", tmp_path / "ours")
    assert found.parent == (tmp_path / "ours" if integers else file.resolve())
