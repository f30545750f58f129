"""Bugs put into an exported model, or into the model in MLX: `validate` finds each one, at the right place, and names
the operation. The fast part is one of each kind; `make mutations` shows all of them."""

from pathlib import Path

import pytest
from combined import thinned
from mutation_run import SEED, Models, all_mutations, make_models, run, table
from mutations import CONFIGS, Mutation
from rich.console import Console

from export.validate import compare

FAST = {  # one of each side; `make mutations` has all
    ("onnxruntime", "norm epsilon a little off in the cached decoder alone, which no number tells"),
    ("mlx", "stale cache row"),
    ("files", "two tokens exchanged"),
}
ALL = all_mutations()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Each made when it is first asked for."""
    folder = tmp_path_factory.mktemp("models")

    class Made(Models):
        def __missing__(self, name: str) -> tuple[Path, Path]:
            self.update(make_models(folder, [name]))
            return self[name]

    return Made()


@pytest.mark.parametrize(
    "key", [key if key in FAST else pytest.param(key, marks=pytest.mark.slow) for key in ALL], ids=": ".join
)
def test_a_bug_is_found_where_it_is_and_its_operation_named(
    key: tuple[str, str], models: Models, tmp_path: Path
) -> None:
    outcome = run(key[1], ALL[key], models, tmp_path)
    assert outcome.caught
    assert not outcome.wrong


@pytest.mark.slow
@pytest.mark.parametrize("name", thinned(CONFIGS, 16))
def test_the_unmutated_models_pass(name: str, models: Models) -> None:
    report = compare(*models[name], seed=SEED, threads=1)
    assert report.equal, report.failures()
    assert report.culprits == ()


def test_a_mutation_that_shows_elsewhere_is_told(models: Models, tmp_path: Path) -> None:
    """The judge of mutations can say no: here it expects another bug than the one that is there."""
    mutation = ALL["onnxruntime", "value bias times .99"]
    assert isinstance(mutation, Mutation)
    outcome = run("another", Mutation(mutation.edit, tap="logits", culprit="classifier"), models, tmp_path)
    assert outcome.caught
    assert "shows at encoder.layers.1.self_attention (tapped), expected logits (tapped)" in outcome.wrong
    assert "blames 'encoder.layers.1.self_attention: value projection'" in outcome.wrong
    console = Console(width=300, record=True, quiet=True)
    console.print(table([outcome]))
