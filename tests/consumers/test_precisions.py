"""Files of lower precision, found by their suffixes: consumers give the tokens of our own runtime on the same files."""

import pytest
from cases import LOWER, LOWER_PHRASES, NEW_TOKENS, Lower, Trained, run
from test_consumers import new_tokens

from export.precision.table import PRECISIONS

pytestmark = pytest.mark.consumers


@pytest.fixture(scope="module")
def lower(trained, tmp_path_factory: pytest.TempPathFactory) -> Lower:
    return Lower.of(trained, tmp_path_factory.mktemp("lower") / "onnx", "portable")


@pytest.fixture(scope="module")
def answers(trained: Trained, lower: Lower, tmp_path_factory: pytest.TempPathFactory):
    """{consumer: {precision: answer}}"""
    texts = trained.phrases[:LOWER_PHRASES]
    common = dict(kind="translate", folder=str(lower.folder), texts=texts, batch=1, max_new_tokens=NEW_TOKENS)
    tasks = {
        "optimum": [dict(name=p, suffix=PRECISIONS[p].suffix, **common) for p in LOWER],
        "transformers.js": [dict(name=p, dtype=PRECISIONS[p].dtype, **common) for p in LOWER],
    }
    try:
        return {name: run(name, given, tmp_path_factory.mktemp("answers")) for name, given in tasks.items()}
    except RuntimeError as error:
        pytest.fail(str(error), pytrace=False)


@pytest.mark.parametrize("precision", LOWER)
@pytest.mark.parametrize("consumer", ["optimum", "transformers.js"])
def test_greedy_tokens(consumer, precision, trained, lower, answers):
    answer = answers[consumer][precision]
    assert "error" not in answer, answer["error"]
    config = trained.model.config
    found = [new_tokens(row, 1, {config.eos_id}, config.pad_id) for row in answer["value"]["ids"]]
    if precision == "float16":  # stored so, and computed in float32 on CPUs
        assert found == lower.tokens[precision]
    assert not (problems := lower.decided_otherwise(precision, found)), problems


def test_the_precisions_are_not_the_same_files(trained, lower):
    """Nor float32's: some phrase differs for each, or it was not that precision that ran."""
    sizes = {p: (lower.folder / "onnx" / f"model{PRECISIONS[p].suffix}.onnx_data").stat().st_size for p in LOWER}
    assert len(set(sizes.values())) == len(LOWER)
    exact = trained.tokens[:LOWER_PHRASES]
    same = {p: sum(a == b for a, b in zip(lower.tokens[p], exact, strict=True)) for p in LOWER}
    assert all(count > LOWER_PHRASES // 2 for count in same.values()), same
