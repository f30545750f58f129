"""What encoders' heads say of text, on the command line: the same as in Python, of lines, files and pairs."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from combined import thinned
from command_line import caller, refused
from head_folders import LABELS
from head_models import head_model, reranker

from export import OnnxTransformer, export_onnx
from mlx_transformer import Transformer
from mlx_transformer.generation import files, line_files
from mlx_transformer.generation.heads import classify

call = pytest.fixture(caller)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("heads")
    for name, labels in (("classes", {}), ("tokens", {"id2label": LABELS}), ("spans", {})):
        export_onnx(head_model(f"bert-{name}", folder / name, **labels), folder / name / "onnx")
    export_onnx(reranker(folder / "ranks"), folder / "ranks" / "onnx")
    return folder


@pytest.fixture(params=thinned(["onnx", "model"], 2))
def form(request: pytest.FixtureRequest) -> str:
    return request.param


def opened(folder: Path) -> Transformer | OnnxTransformer:
    return Transformer.load(folder) if folder.name == "model" else OnnxTransformer(folder)


def objects(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines()]


def test_classify_says_what_python_does(models: Path, form: str, call, tmp_path: Path) -> None:
    lines = ["a good film", "it was bad\tso it is not good", "", "not\ta\tfilm"]
    texts = ["a good film", ("it was bad", "so it is not good"), "", ("not", "a\tfilm")]
    folder = models / "classes" / form
    expected = [[asdict(scored) for scored in one] for one in opened(folder).classify(texts)]
    (tmp_path / "in").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    status, _, err = call("classify", folder, "-i", tmp_path / "in", "-o", tmp_path / "out", "--all")
    assert (status, err.count("cut there")) == (0, 0)
    found = objects((tmp_path / "out").read_text(encoding="utf-8"))
    assert [each.pop("classes") for each in found] == expected
    assert found == [
        {"text": "a good film"},
        {"text": "it was bad", "text_pair": "so it is not good"},
        {"text": ""},
        {"text": "not", "text_pair": "a\tfilm"},
    ]
    _, out, _ = call("classify", folder, *lines)
    assert [each["classes"] for each in objects(out)] == [one[:1] for one in expected]
    _, out, _ = call("classify", folder, "--all", "--several", stdin="not\n")
    assert objects(out)[0]["classes"] == [asdict(each) for each in opened(folder).classify("not", several=True)]


def test_rerank_says_what_python_does(models: Path, form: str, call, tmp_path: Path) -> None:
    folder = models / "ranks" / ("one" if form == "model" else form)
    queries = [("good film", ["it was bad", "a good film", "not so bad"]), ("bad", ["bad", "good " * 40])]
    runs = Transformer.load(folder) if form == "model" else OnnxTransformer(folder)
    expected = [runs.rerank(query, documents, top_n=2) for query, documents in queries]
    assert [each.relevance_score for each in expected[0]] == sorted(
        (e.relevance_score for e in expected[0]), reverse=True
    )
    rows = {"in.tsv": ["\t".join([query, *documents]) for query, documents in queries]}
    rows["in.jsonl"] = [json.dumps({"query": query, "documents": documents}) for query, documents in queries]
    for name, lines in rows.items():
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        status, out, err = call("rerank", folder, "-i", tmp_path / name, "--top-n", 2)
        assert (status, "1 of 2 lines, the first of them line 2: longer than 26 tokens" in err) == (0, True)
        assert objects(out) == [
            {"query": q, "results": [{**asdict(each), "document": documents[each.index]} for each in ranked]}
            for (q, documents), ranked in zip(queries, expected, strict=True)
        ]


def test_tag_says_what_python_does(models: Path, form: str, call, tmp_path: Path) -> None:
    lines = ["Films,  filé GOODS and bading. 😀 not", "", "so so it it"]
    folder = models / "tokens" / form
    expected = [[asdict(entity) for entity in one] for one in opened(folder).tag(lines)]
    assert expected[0]
    assert lines[0][expected[0][0]["start"] : expected[0][0]["end"]] == expected[0][0]["text"]
    (tmp_path / "in").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    assert call("tag", folder, "-i", tmp_path / "in", "-o", tmp_path / "out")[0] == 0
    text = (tmp_path / "out").read_text(encoding="utf-8")
    assert objects(text) == [{"text": line, "entities": found} for line, found in zip(lines, expected, strict=True)]
    assert call("tag", folder, stdin="".join(f"{line}\n" for line in lines))[1] == text
    long = "good " * 200
    status, out, err = call("tag", folder, long)
    assert (status, "cut there" in err) == (0, False)
    assert objects(out)[0]["entities"] == [asdict(entity) for entity in opened(folder).tag(long)]


def test_evaluate_counts_what_is_right(models: Path, form: str, call, tmp_path: Path) -> None:
    lines = ["a good film", "it was bad", "not"]
    found = [best[0].label for best in opened(models / "classes" / form).classify(lines)]
    labels = [found[0], found[1], next(label for label in ("bad", "fair", "good") if label != found[2])]
    path = tmp_path / "labelled.tsv"
    path.write_text("".join(f"{line}\t{label}\n" for line, label in zip(lines, labels, strict=True)), encoding="utf-8")
    status, out, _ = call("evaluate", models / "classes" / form, "--labelled", path)
    assert status == 0
    assert json.loads(out)["accuracy"] == pytest.approx(2 / 3)
    runs = opened(models / "tokens" / form)
    tagged = [{"text": line, "entities": [asdict(entity) for entity in runs.tag(line)]} for line in lines]
    path = tmp_path / "tagged.jsonl"
    path.write_text("".join(f"{json.dumps(each)}\n" for each in tagged), encoding="utf-8")
    assert json.loads(call("evaluate", models / "tokens" / form, "--labelled", path)[1])["f1"] == pytest.approx(1)
    runs = opened(models / "spans" / form)
    asked = [("is it", "a good film"), ("not", "it was bad")]
    said = [{"question": q, "context": c, "answer": asdict(runs.answer(q, c))} for q, c in asked]
    path = tmp_path / "asked.jsonl"
    path.write_text("".join(f"{json.dumps(each)}\n" for each in said), encoding="utf-8")
    assert json.loads(call("evaluate", models / "spans" / form, "--labelled", path)[1])["exact_match"] == 1


def test_answer_says_what_python_does(models: Path, form: str, call, tmp_path: Path) -> None:
    pairs = [("so is it good", "A  good filé, was bad. " * 9), ("not", ""), ("it", "so\tit is")]
    folder = models / "spans" / form
    runs = opened(folder)
    expected = [runs.answer(*pair, max_answer_tokens=4) for pair in pairs]
    (tmp_path / "in").write_text("".join(f"{q}\t{c}\n" for q, c in pairs), encoding="utf-8")
    status, _, _ = call("answer", folder, "-i", tmp_path / "in", "-o", tmp_path / "out", "--max-answer-tokens", 4)
    assert status == 0
    assert objects((tmp_path / "out").read_text(encoding="utf-8")) == [
        {"question": question, "context": context, "answer": None if found is None else asdict(found)}
        for (question, context), found in zip(pairs, expected, strict=True)
    ]
    assert [found is None for found in expected] == [False, True, False]
    status, out, err = call("answer", folder, stdin=f"{'good ' * 30}\tnot a film\n")
    assert "standard input: 1 of 1 lines, the first of them line 1: longer than 11 tokens, cut there\n" in err
    [found] = objects(out)
    cut = runs.answer("good " * 11, "not a film")
    assert cut is not None
    assert found["answer"] == asdict(cut)


def test_a_file_in_which_a_context_is_missing_is_refused_at_once(models: Path, call, tmp_path: Path) -> None:
    (tmp_path / "in").write_text("is it\tgood\nnot\n", encoding="utf-8")
    given = ["answer", models / "spans" / "model", "-i", tmp_path / "in", "-o", tmp_path / "out"]
    refused(call(*given), "line 2: has no tab: give a question, a tab, and the context")
    assert {path.name for path in tmp_path.iterdir()} == {"in"}


def test_a_text_that_is_too_long_is_cut_and_counted(models: Path, call) -> None:
    long = "good " * 30
    status, out, err = call("classify", models / "classes" / "model", "bad", long)
    assert status == 0
    assert "text: 1 of 2 lines, the first of them line 2: longer than 26 tokens, cut there\n" in err
    [_, found] = objects(out)
    [kept] = objects(call("classify", models / "classes" / "model", "good " * 24)[1])
    assert found == {**kept, "text": long}
    status, out, err = call("classify", models / "classes" / "model", f"bad\t{long}", "bad\tgood")
    assert "text: 1 of 2 lines, the first of them line 1: longer than 26 tokens, cut there\n" in err
    [cut, _] = objects(out)
    [kept] = objects(call("classify", models / "classes" / "model", "bad\t" + "good " * 22)[1])
    assert cut == {**kept, "text_pair": long}


def test_an_interrupted_file_is_continued(models: Path, call, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(line_files, "PART_LINES", 2)
    (tmp_path / "in").write_text("a good film\nbad\nnot\nso it is\nfilm\n", encoding="utf-8")
    given = ["classify", models / "classes" / "onnx", "-i", tmp_path / "in", "-o", tmp_path / "out"]
    call(*given)
    whole = (tmp_path / "out").read_bytes()
    (tmp_path / "out").unlink()
    seen = []

    def interrupted(encoder, texts, several, told):
        seen.append(told.first_line)
        if len(seen) == 2:
            raise KeyboardInterrupt
        return classify(encoder, texts, several, told)

    with monkeypatch.context() as patched:
        patched.setattr(files, "classify", interrupted)
        assert "2 lines are done: go on with --resume" in call(*given)[2]
    assert seen == [1, 3]
    assert not (tmp_path / "out").exists()
    refused(call(*given), "holds what an interrupted run has done; go on with --resume")
    refused(call(*given, "--resume", "--all"), "no --all before, now True")
    assert call(*given, "--resume")[0] == 0
    assert (tmp_path / "out").read_bytes() == whole


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["classify", "classes", "x", "--resume"], "--resume continues a file: it needs"),
        (["classify", "classes", "x", "--runtime", "onnx"], "here an ONNX folder is needed"),
        (["classify", "tokens", "x"], "classify needs a head of kind 'classes'; its head is of kind 'token-classes'"),
        (["rerank", "classes", "a\tb"], "rerank needs a head with one class; its head has 3"),
        (["rerank", "tokens", "a\tb"], "rerank needs a head of kind 'classes'; its head is of kind 'token-classes'"),
        (["rerank", "ranks", "a"], "line 1: has no tab: give a query and its documents"),
        (["rerank", "ranks", "a\tb", "--top-n", "0"], "--top-n 0 must be a whole number of at least 1"),
        (["answer", "spans", "x"], "line 1: has no tab: give a question, a tab, and the context"),
        (["answer", "classes", "x"], "answer needs a head of kind 'spans'; its head is of kind 'classes'"),
        (["tag", "classes", "x"], "tag needs a head of kind 'token-classes'; its head is of kind 'classes'"),
    ],
)
def test_refused_by_name(arguments: list[str], message: str, models: Path, call) -> None:
    command, name, *rest = arguments
    refused(call(command, models / name / ("one" if name == "ranks" else "model"), *rest), message)


@pytest.mark.parametrize(
    ("command", "kind"), [("classify", "classes"), ("rerank", "ranks"), ("tag", "tokens"), ("answer", "spans")]
)
def test_a_file_that_names_another_form_is_refused(models: Path, command: str, kind: str, call, tmp_path: Path) -> None:
    told = call(command, models / kind / "onnx", "-o", tmp_path / "out.csv", stdin="a\tb\n")
    refused(told, f"{command} writes no .csv; give a name that ends in .jsonl")
    assert not list(tmp_path.iterdir())
