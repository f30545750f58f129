"""A page in headless Chromium translates with an exported folder and gives MLX's greedy tokens, as ids and as text.

Once with onnxruntime-web and nothing else, once with transformers.js; on one thread, and on two in a page that is
cross-origin isolated. Nothing but localhost is asked for anything.
"""

import os
from collections.abc import Callable
from typing import Any

import pytest
from consumers.cases import BATCH, NEW_TOKENS, run
from consumers.test_consumers import differing, new_tokens

pytestmark = pytest.mark.consumers

PHRASES = 64
THREADS = (1, 2)


@pytest.fixture(scope="module")
def ask(trained, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """ask(task's name) -> its answer. One browser answers all of them, in a page each."""
    texts = trained.phrases[:PHRASES]
    common = dict(folder=str(trained.web), batch=BATCH, max_new_tokens=NEW_TOKENS)
    rows = trained.tokenizer.encode_batch(texts)
    tasks = []
    for threads in THREADS:
        tasks += [
            dict(name=f"ort {threads}", kind="ort", rows=rows, threads=threads, **common),
            dict(name=f"transformers {threads}", kind="transformers", texts=texts, threads=threads, **common),
        ]
    place = tmp_path_factory.mktemp("chromium")
    try:
        answers = run("chromium", tasks, place)
    except RuntimeError as error:
        pytest.fail(f"{error}\nThe browser's log: {place / 'browser.log'}", pytrace=False)

    def ask(name: str) -> Any:
        if "error" in answers[name]:
            pytest.fail(f"{name}: {answers[name]['error']}", pytrace=False)
        return answers[name]["value"]

    return ask


@pytest.mark.parametrize("threads", THREADS)
def test_onnxruntime_web(threads, trained, ask):
    found = ask(f"ort {threads}")
    assert found["isolated"] == (threads > 1)
    assert found["threads"] == threads
    assert not differing(trained, found["ids"])
    assert len(found["ids"]) == PHRASES


@pytest.mark.parametrize("threads", THREADS)
def test_transformers_js(threads, trained, ask):
    found = ask(f"transformers {threads}")
    config = trained.model.config
    assert not differing(trained, [new_tokens(row, 1, config.eos_id, config.pad_id) for row in found["ids"]])
    assert found["texts"] == trained.tokenizer.decode_batch(trained.tokens[:PHRASES])


def test_what_is_missing_is_said_in_one_line(tmp_path, monkeypatch):
    """A browser that isn't there."""
    monkeypatch.setitem(os.environ, "CHROMIUM", str(tmp_path / "no-chromium"))
    with pytest.raises(RuntimeError, match="no-chromium"):
        run("chromium", [], tmp_path)
