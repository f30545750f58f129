"""Messages name options as they are typed."""

import pytest

from mlx_transformer.commands.app import as_options, command_of, options_of

KNOWN = options_of(command_of("mlx-transformer").commands["translate"].params)


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
    assert as_options(message, KNOWN, ["translate", "model", "--beam", "0"]) == shown


def test_what_the_user_wrote_stays():
    assert (
        as_options("runs/beam=3: no such folder", KNOWN, ["translate", "runs/beam=3"]) == "runs/beam=3: no such folder"
    )
