"""Pairs from TSV, JSON lines, Parquet and Arrow: the same pairs from each, and what is refused where."""

from __future__ import annotations

import builtins
import gzip
import json
import os
import sys
import threading

import pyarrow as pa
import pyarrow.parquet
import pytest
from waiting import PATIENCE

from mlx_transformer.data.corpus import PairFiles, language_pair
from mlx_transformer.system.errors import UserError

PAIRS = [("a b", "ä ö"), ("", "empty"), ("three\u2028x", "drei"), ("nul \0", "4")] + [
    (f"s{i}", f"t{i}") for i in range(40)
]


def read(path, **options) -> list[tuple[str, str]]:
    parts = list(PairFiles(pairs=str(path), **options).parts())
    return [pair for source, target in parts for pair in zip(source, target, strict=True)]


def table(form: str = "columns", languages: tuple[str, str] = ("source", "target"), kind=None):
    first, second = languages
    if form == "columns":
        kind = kind or pa.string()
        return pa.table({f: pa.array([p[i] for p in PAIRS], kind) for i, f in enumerate(languages)})
    return pa.table({"id": list(range(len(PAIRS))), "translation": [{first: s, second: t} for s, t in PAIRS]})


def write_dataset(folder, data) -> None:
    """As save_to_disk of `datasets` does, in two files."""
    folder.mkdir()
    names = ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    for name, part in zip(names, (data.slice(0, 7), data.slice(7)), strict=True):
        with pa.OSFile(str(folder / name), "wb") as file, pa.ipc.new_stream(file, data.schema) as writer:
            writer.write_table(part, max_chunksize=5)
    state = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "0", "_split": None}
    (folder / "state.json").write_text(json.dumps(state), encoding="utf-8")
    (folder / "dataset_info.json").write_text("{}", encoding="utf-8")


def test_tsv(tmp_path):
    text = "".join(f"{s}\t{t}\n" for s, t in PAIRS)
    (tmp_path / "p.tsv").write_text(text, encoding="utf-8", newline="\n")
    (tmp_path / "p.tsv.gz").write_bytes(gzip.compress(text.encode()))
    assert read(tmp_path / "p.tsv") == read(tmp_path / "p.tsv.gz") == PAIRS


@pytest.mark.parametrize(("columns", "line"), [(1, "alone"), (3, "a\tb\tc"), (1, "")])
def test_a_line_of_other_columns_is_named(tmp_path, columns, line):
    (tmp_path / "p.tsv").write_text(f"a\tb\nc\td\n{line}\ne\tf\n", encoding="utf-8")
    with pytest.raises(UserError, match=rf"p.tsv, line 3: {columns} columns; each line is a source, one tab"):
        read(tmp_path / "p.tsv")


def test_json_lines(tmp_path):
    forms = {
        "top": [{"source": s, "target": t, "id": 1} for s, t in PAIRS],
        "inside": [{"translation": {"source": s, "target": t}} for s, t in PAIRS],
    }
    for name, rows in forms.items():
        path = tmp_path / f"{name}.jsonl"
        path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n", encoding="utf-8")
        assert read(path) == PAIRS
    path.write_text('{"translation": {"en": "a", "de": "b"}}\n{"en": "c", "de": null}', encoding="utf-8")
    assert read(path, languages="en-de") == [("a", "b"), ("c", "")]
    assert read(path, languages="de-en") == [("b", "a"), ("", "c")]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"source": "a"}', r'has no "source" and "target", alone or inside "translation"; languages = "en-de" names'),
        ('{"translation": "a"}', 'has no "source" and "target"'),
        ('{"translation": {"en": "a", "de": "b"}}', 'has no "source" and "target"'),
        ("[1]", 'has no "source" and "target"'),
        ("7", 'has no "source" and "target"'),
        ('{"source": "a", "target": 7}', "target is 7, no text"),
        ('{"source": "\\ud800", "target": "b"}', "source holds half a surrogate pair"),
        ('{"source": "a", ', "not JSON"),
        ("[" * 50_000, "not JSON"),
    ],
)
def test_a_line_of_other_json_is_named(tmp_path, line, message):
    path = tmp_path / "p.jsonl"
    path.write_text('{"source": "a", "target": "b"}\n' * 2 + line + "\n", encoding="utf-8")
    with pytest.raises(UserError, match=f"p.jsonl, line 3: {message}") as caught:
        read(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("form", ["columns", "translation"])
def test_parquet_and_arrow(tmp_path, form):
    names = {"columns": {"languages": "en-de"}, "translation": {"languages": "en,de"}}[form]
    data = table(form, ("en", "de"))
    pyarrow.parquet.write_table(data, tmp_path / "p.parquet", row_group_size=9)
    write_dataset(tmp_path / "folder", data)
    with pa.OSFile(str(tmp_path / "p.arrow"), "wb") as file, pa.ipc.new_file(file, data.schema) as writer:
        writer.write_table(data)
    stream = tmp_path / "folder" / "data-00001-of-00002.arrow"
    assert read(tmp_path / "p.parquet", **names) == PAIRS
    assert read(tmp_path / "folder", **names) == PAIRS
    assert read(tmp_path / "p.arrow", **names) == PAIRS
    assert read(stream, **names) == PAIRS[7:]
    assert read(tmp_path / "p.parquet", languages="de-en") == [(t, s) for s, t in PAIRS]
    assert len(PairFiles(pairs=str(tmp_path / "folder")).files) == 2


def test_types_of_text(tmp_path):
    for kind in (pa.large_string(), pa.dictionary(pa.int32(), pa.string()), pa.string_view()):
        data = table(kind=kind)
        with pa.OSFile(str(tmp_path / "p.arrow"), "wb") as file, pa.ipc.new_file(file, data.schema) as writer:
            writer.write_table(data)
        assert read(tmp_path / "p.arrow") == PAIRS
    nulls = pa.table({"source": ["a", None], "target": ["b", "c"]})
    pyarrow.parquet.write_table(nulls, tmp_path / "p.parquet")
    assert read(tmp_path / "p.parquet") == [("a", "b"), ("", "c")]


def test_columns_that_are_not_there_or_no_text(tmp_path):
    path = tmp_path / "p.parquet"
    for data in ({"source": ["a"]}, {"target": ["a"]}, {"en": ["a"], "de": ["b"]}, {"translation": ["a"]}):
        pyarrow.parquet.write_table(pa.table(data), path)
        with pytest.raises(UserError, match=r'p.parquet: has no "source" and "target", alone or inside'):
            read(path)
    pyarrow.parquet.write_table(pa.table({"translation": [{"en": "a", "fr": "b"}]}), path)
    with pytest.raises(UserError, match=r'p.parquet: has no "en" and "de"'):
        read(path, languages="en-de")
    pyarrow.parquet.write_table(pa.table({"source": [1], "target": ["b"]}), path)
    with pytest.raises(UserError, match="its column source holds int64, no text"):
        read(path)


@pytest.mark.parametrize("name", ["p.parquet", "p.arrow"])
def test_damaged_tables(tmp_path, name):
    path = tmp_path / name
    for data in (b"", b"no table at all", b"PAR1" + b"\0" * 40 + b"PAR1", b"ARROW1\0\0" + b"\xff" * 40):
        path.write_bytes(data)
        with pytest.raises(UserError, match=rf"{name}, from row 1 on: damaged \(|no pairs in it"):
            read(path)
    with pytest.raises(UserError, match=r"none.* cannot be read"):
        read(tmp_path / f"none{path.suffix}")


def test_folders_that_are_none(tmp_path):
    with pytest.raises(UserError, match=r"without state.json, which datasets' save_to_disk writes"):
        read(tmp_path)
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}', encoding="utf-8")
    with pytest.raises(UserError, match=r"holds the splits train, test; name one, such as .*/train"):
        read(tmp_path)
    (tmp_path / "dataset_dict.json").unlink()
    for state in ("{}", "[]", '{"_data_files": []}', '{"_data_files": [1]}', "{"):
        (tmp_path / "state.json").write_text(state, encoding="utf-8")
        with pytest.raises(UserError, match=r"state.json"):
            read(tmp_path)
    (tmp_path / "state.json").write_text('{"_data_files": [{"filename": "../x.arrow"}]}', encoding="utf-8")
    assert PairFiles(pairs=str(tmp_path)).files == [tmp_path / "x.arrow"]


def test_names_of_files_and_languages():
    with pytest.raises(UserError, match=r"p.csv: pairs are read from .tsv, .jsonl .* what ends otherwise is none"):
        read("p.csv")
    with pytest.raises(UserError, match=r"p.parquet.gz: pairs are read from"):
        read("p.parquet.gz")
    assert [language_pair(text) for text in ("en-de", "zh-CN, en")] == [("en", "de"), ("zh-CN", "en")]
    for text in ("en", "en-", "a-b-c", "en-en", ""):
        with pytest.raises(UserError, match="give two names"):
            language_pair(text)


def test_a_missing_package_is_one_line_that_names_the_extra(tmp_path, monkeypatch):
    pyarrow.parquet.write_table(table(), tmp_path / "p.parquet")
    imported = builtins.__import__

    def without(name, *others, **more):
        if name.startswith("pyarrow"):
            raise ImportError(name)
        return imported(name, *others, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UserError, match=r"p.parquet: a Parquet or Arrow file needs pyarrow: pip install .*\[data\]"):
        read(tmp_path / "p.parquet")


@pytest.mark.skipif(sys.platform == "win32", reason="special files")
@pytest.mark.parametrize("name", ["p.tsv", "p.jsonl", "p.parquet", "p.arrow"])
def test_a_pipe_that_nobody_writes_to_is_not_waited_for(tmp_path, name):
    os.mkfifo(tmp_path / name)
    opened = []

    def read_it() -> None:
        with pytest.raises(UserError, match=f"{name}: is no regular file; put a copy of its contents there"):
            read(tmp_path / name)
        opened.append(name)

    thread = threading.Thread(target=read_it, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert opened == [name]
