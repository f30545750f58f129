"""Models and answers that all these tests share: everything is made, and every consumer run, once."""

from collections.abc import Callable
from typing import Any

import cases
import pytest

from mlx_transformer import UserError


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> cases.Trained:
    try:
        return cases.trained_model(tmp_path_factory.mktemp("trained"))
    except UserError as error:
        pytest.fail(f"{error}; run make test-consumers, with MODEL=folder for a model of your own", pytrace=False)


@pytest.fixture(scope="session")
def randoms(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], cases.RandomModel]:
    """{(architecture, name in small_models)}"""
    return {
        (architecture, name): cases.random_model(architecture, name, tmp_path_factory.mktemp("random"))
        for architecture in cases.ARCHITECTURES
        for name in (*cases.RANDOM, *(cases.PUBLISHED if architecture == "decoder" else ()))
    }


@pytest.fixture(scope="session")
def chats(tmp_path_factory: pytest.TempPathFactory) -> dict[str, cases.Chat]:
    return {kind: cases.Chat.of(kind, tmp_path_factory.mktemp("chat")) for kind in cases.CHATS}


@pytest.fixture(scope="session")
def marked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, cases.Marked]:
    return {name: cases.Marked.of(name, tmp_path_factory.mktemp("marked")) for name in cases.MARKED}


@pytest.fixture(scope="session")
def ask(trained, randoms, chats, marked, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Any]:
    """ask(consumer, task's name) -> its answer. A consumer runs when it is first asked."""
    tasks = cases.all_tasks(trained, randoms, chats, marked)
    answers: dict[str, dict[str, Any]] = {}

    def ask(consumer: str, name: str) -> Any:
        if consumer not in answers:
            try:
                answers[consumer] = cases.run(consumer, tasks, tmp_path_factory.mktemp(consumer))
            except RuntimeError as error:
                pytest.fail(str(error), pytrace=False)
        answer = answers[consumer][name]
        if "error" in answer:
            pytest.fail(f"{consumer}, {name}: {answer['error']}", pytrace=False)
        return answer["value"]

    return ask
