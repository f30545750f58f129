"""classify, rerank, tag, answer: what an encoder's head says of text."""

from __future__ import annotations

from typing import Annotated

from mlx_transformer.generation.text_options import AnswerOptions, ClassifyOptions, RerankOptions

from .models import run_on_lines
from .settings import Folder, LineFiles, RuntimeSettings, Shown, Texts


def classify(
    model: Folder,
    text: Texts = None,
    *,
    files: LineFiles,
    options: Annotated[ClassifyOptions, Shown()],
    runtime: Annotated[RuntimeSettings, Shown("Runtime")],
) -> None:
    """Say which class a text is of, with an encoder: JSON for each line, which may be a pair of texts with a tab
    between them."""
    from mlx_transformer.generation.files import classify_lines

    run_on_lines("classify", model, text, files, runtime, lambda opened, out: classify_lines(opened, options))


def rerank(
    model: Folder,
    text: Texts = None,
    *,
    files: LineFiles,
    options: Annotated[RerankOptions, Shown()],
    runtime: Annotated[RuntimeSettings, Shown("Runtime")],
) -> None:
    """Order documents by how well they fit a query, with an encoder that reads both: JSON for each line, which is a
    query and its documents with tabs between them; in a .jsonl file {"query": ..., "documents": [...]}."""
    from mlx_transformer.generation.files import rerank_lines

    as_json = files.input is not None and files.input.suffix == ".jsonl"
    run_on_lines("rerank", model, text, files, runtime, lambda opened, out: rerank_lines(opened, options, as_json))


def tag(
    model: Folder,
    text: Texts = None,
    *,
    files: LineFiles,
    runtime: Annotated[RuntimeSettings, Shown("Runtime")],
) -> None:
    """Find names and other labelled parts of a text, with an encoder: JSON for each line, with labels, probabilities
    and places."""
    from mlx_transformer.generation.files import tag_lines

    run_on_lines("tag", model, text, files, runtime, lambda opened, out: tag_lines(opened))


def answer(
    model: Folder,
    text: Texts = None,
    *,
    files: LineFiles,
    options: Annotated[AnswerOptions, Shown()],
    runtime: Annotated[RuntimeSettings, Shown("Runtime")],
) -> None:
    """Answer questions by a part of a text, with an encoder: JSON for each line, which is a question, a tab, and the
    text."""
    from mlx_transformer.generation.files import answer_lines

    run_on_lines("answer", model, text, files, runtime, lambda opened, out: answer_lines(opened, options))
