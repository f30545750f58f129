"""onnxruntime-genai loads exported decoders unchanged and gives MLX's greedy tokens, one by one and in a batch.

Its tokenizer can't read ours (a regular expression with counted repetition), so it is given ids.
"""

import mlx.core as mx
import pytest
from cases import RANDOM, RANDOM_NEW_TOKENS, RandomModel, run

pytestmark = pytest.mark.consumers


@pytest.fixture(scope="module")
def answers(randoms, tmp_path_factory: pytest.TempPathFactory):
    """{(name in small_models, one batch?): its answer}"""
    tasks = []
    for name in RANDOM:
        random = randoms["decoder", name]
        common = dict(folder=str(random.folder), rows=random.rows, pad_id=random.config.pad_id)
        for together in (False, True):
            more = dict(name=f"{name} {together}", kind="generate", max_new_tokens=RANDOM_NEW_TOKENS, together=together)
            tasks.append({**common, **more})
    try:
        return run("genai", tasks, tmp_path_factory.mktemp("genai"))
    except RuntimeError as error:
        pytest.fail(str(error), pytrace=False)


def unrestricted(random: RandomModel) -> list[list[int]]:
    """Greedy tokens with nothing banned: genai has no list of tokens that may not be chosen."""
    rows = []
    for prompt in random.rows:
        new: list[int] = []
        while len(new) < RANDOM_NEW_TOKENS:
            id = int(random.model(mx.array([[*prompt, *new]]))[0, -1].argmax())
            if id == random.config.eos_id:
                break
            new.append(id)
        rows.append(new)
    return rows


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("name", RANDOM)
def test_greedy_tokens(name, together, randoms, answers):
    answer = answers[f"{name} {together}"]
    assert "error" not in answer, answer["error"]
    random = randoms["decoder", name]
    expected = unrestricted(random)
    eos = random.config.eos_id
    found = [row[: row.index(eos)] if eos in row else row for row in answer["value"]]
    assert found == expected
    assert len({id for row in expected for id in row}) > 5
