"""Messages name options as they are typed."""

import pytest
from typer.main import get_command

from mlx_transformer.commands.app import app_of
from mlx_transformer.commands.spelling import spelled, spellings

KNOWN = spellings(get_command(app_of("mlx-transformer")).commands["translate"].params)  # type: ignore[attr-defined]


def test_options_are_known():
    assert KNOWN["beam"] == ("--beam", False)
    assert KNOWN["early_stopping"] == ("--early-stopping", True)
    assert KNOWN["no_verify"] == ("--no-verify", True)
    assert "model" not in KNOWN  # is given without a name


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("beam=0 must be a whole number", "--beam 0 must be a whole number"),
        ("top_k=3 has no effect: add sample=True", "--top-k 3 has no effect: add --sample"),
        ("use sample=False", "use no --sample"),
        ("max_new_tokens is 3: raise it", "--max-new-tokens is 3: raise it"),
        ("at most 40 (max_positions=40)", "at most 40 (max_positions=40)"),  # of the model
        ("choose overlong=truncate or overlong=split", "choose --overlong truncate or --overlong split"),
        ("data.top_k = 3 must be text", "data.top_k = 3 must be text"),  # a key of a file
        ("a beam of light, --beam 2", "a beam of light, --beam 2"),
    ],
)
def test_arguments_become_options(message, shown):
    assert spelled(message, KNOWN, ["translate", "model", "--beam", "0"]) == shown


def test_what_the_user_wrote_stays():
    assert spelled("runs/beam=3: no such folder", KNOWN, ["translate", "runs/beam=3"]) == "runs/beam=3: no such folder"
