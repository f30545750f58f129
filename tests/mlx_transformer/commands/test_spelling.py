"""Messages name options as they are typed, and commands as the program that runs calls them."""

import pickle

import pytest

from mlx_transformer.commands.app import EXPORT, command_of, spelling_of
from mlx_transformer.system.errors import CommandLine, Name, Text, UserError, first_of, joined, refusal

TRANSLATE = command_of("mlx-transformer").commands["translate"].params
HERE, THERE = (spelling_of(program, TRANSLATE) for program in ("mlx-transformer", EXPORT))


@pytest.mark.parametrize(
    ("part", "python", "typed"),
    [
        (Name("beam", "0"), "beam=0", "--beam 0"),
        (Name("beam"), "beam", "--beam"),
        (Name("max_new_tokens"), "max_new_tokens", "--max-new-tokens"),
        (Name("sample", "True"), "sample=True", "--sample"),
        (Name("sample", "False"), "sample=False", "no --sample"),
        (Name("verify", "False"), "verify=False", "--no-verify"),
        (Name("max_positions", "40"), "max_positions=40", "max_positions=40"),  # of the model: no option
        (Name("model", "x"), "model=x", "model=x"),  # is given without a name
        (CommandLine("export", "m OUT"), "mlx-transformer export m OUT", "mlx-transformer export m OUT"),
    ],
)
def test_each_part_has_two_spellings(part, python, typed):
    assert (str(part), HERE(part)) == (python, typed)


def test_a_command_is_called_as_the_program_that_runs_calls_it():
    assert THERE(CommandLine("export", "m OUT")) == "python -m export build m OUT"
    assert THERE(CommandLine("validate")) == "python -m export validate"
    assert THERE(CommandLine("quantize", "m q")) == "mlx-transformer quantize m q"  # which it doesn't have


def test_only_what_is_data_is_spelled_otherwise():
    """Neither a path nor a word that the user wrote."""
    error = UserError("{}: {top_k} has an effect in {!r} only: give {beam}", "runs/beam=3", "top_k=3 {}", top_k=3)
    assert str(error) == "runs/beam=3: top_k=3 has an effect in 'top_k=3 {}' only: give beam"
    assert error.said(HERE) == "runs/beam=3: --top-k 3 has an effect in 'top_k=3 {}' only: give --beam"
    assert str(UserError("runs/{beam}: {}")) == "runs/{beam}: {}"


def test_names_survive_where_an_error_is_part_of_another():
    inner = Text("{n_best} is more than {beam}", n_best=3, beam=1)
    for outer in (
        UserError("line {}: {}", 3, UserError("{}", inner)),
        UserError("line {}: {}", 3, joined([inner])),
        UserError("line {}: {}", 3, first_of([inner])),
        refusal("line 3", [inner], "m"),
    ):
        assert str(outer) == "line 3: n_best=3 is more than beam=1"
        assert outer.said(HERE) == "line 3: --n-best 3 is more than --beam 1"
        outer.add("2 lines are done {}")
        sent = pickle.loads(pickle.dumps(outer))  # as from the process of `compare`
        assert sent.said(HERE) == "line 3: --n-best 3 is more than --beam 1; 2 lines are done {}"
    assert refusal("m", ["x" * 600], "m").said(THERE).endswith("; python -m export info m lists all")
