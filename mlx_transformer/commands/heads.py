"""classify, rerank, tag, answer: what an encoder's head says of text."""

from __future__ import annotations

from typing import Annotated

from mlx_transformer.generation.text_options import AnswerOptions, ClassifyOptions, RerankOptions

from .models import facts_of, open_folder
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
    from mlx_transformer.generation.head_files import classify_lines
    from mlx_transformer.generation.line_files import write_lines

    out = files.claimed("classify", model)
    opened, facts = open_folder(model, **vars(runtime)), facts_of(model, runtime)
    work = classify_lines(opened, options)
    write_lines(work, files.input, out, text=text or (), resume=files.resume, model_facts=facts)


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
    from mlx_transformer.generation.head_files import rerank_lines
    from mlx_transformer.generation.line_files import write_lines

    out = files.claimed("rerank", model)
    opened, facts = open_folder(model, **vars(runtime)), facts_of(model, runtime)
    as_json = files.input is not None and files.input.suffix == ".jsonl"
    work = rerank_lines(opened, options, as_json)
    write_lines(work, files.input, out, text=text or (), resume=files.resume, model_facts=facts)


def tag(
    model: Folder,
    text: Texts = None,
    *,
    files: LineFiles,
    runtime: Annotated[RuntimeSettings, Shown("Runtime")],
) -> None:
    """Find names and other labelled parts of a text, with an encoder: JSON for each line, with labels, probabilities
    and places."""
    from mlx_transformer.generation.head_files import tag_lines
    from mlx_transformer.generation.line_files import write_lines

    out = files.claimed("tag", model)
    opened, facts = open_folder(model, **vars(runtime)), facts_of(model, runtime)
    work = tag_lines(opened)
    write_lines(work, files.input, out, text=text or (), resume=files.resume, model_facts=facts)


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
    from mlx_transformer.generation.head_files import answer_lines
    from mlx_transformer.generation.line_files import write_lines

    out = files.claimed("answer", model)
    opened, facts = open_folder(model, **vars(runtime)), facts_of(model, runtime)
    work = answer_lines(opened, options)
    write_lines(work, files.input, out, text=text or (), resume=files.resume, model_facts=facts)
