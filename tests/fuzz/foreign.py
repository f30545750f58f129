"""What others hand us beside plain damage: folders of sentence-transformers and of transformers 5, holes and bombs,
folders mixed of two models, and a poisoned cache of the Hub."""

from __future__ import annotations

import json
import os
import shutil
import struct
import zipfile
from pathlib import Path
from random import Random
from typing import Any

import damage
import tokenizers
from attempts import Attempt
from foreign_json import VALUES, nodes, replaced
from hub_server import COMMIT
from kind import Class, on, one_of

GOLDEN = Path(__file__).parents[1] / "mlx_transformer" / "families"
SAVED_BY_5 = sorted(folder.parent for folder in GOLDEN.glob("golden*_5/*/config.json"))
HUGE = 3_400_000_000


def of_another_type(random: Random, path: Path) -> None:
    """One value of a JSON file, wherever it stands, becomes one of another type."""
    values = json.loads(path.read_text(encoding="utf-8"))
    way, value = random.choice(list(nodes(values))), random.choice(VALUES)
    if isinstance(value, int) and value.bit_length() > 1000:
        value = 2**1000
    path.write_bytes(json.dumps(replaced(values, way, value)).encode(errors="surrogatepass"))


def saved_by_5(random: Random, folder: Path) -> None:
    """FOLDER/of-5: a model whose vocabulary is tokenizer.json and tokenizer_config.json alone, as version 5 of
    transformers saves all of them; half of the time one of its JSON files has a value of another type."""
    theirs = folder / "of-5"
    shutil.copytree(random.choice(SAVED_BY_5), theirs, ignore=shutil.ignore_patterns("answers.npz"))
    config = json.loads((theirs / "config.json").read_text(encoding="utf-8"))
    config["dtype"] = config.pop("torch_dtype", config.get("dtype", "float32"))
    if random.random() < 0.3:
        config["rope_parameters"] = {"rope_theta": 10000.0, "rope_type": random.choice(["default", "yarn"])}
    (theirs / "config.json").write_text(json.dumps(config), encoding="utf-8")
    size = random.choice([config["vocab_size"], config["vocab_size"] + 9, max(8, config["vocab_size"] // 2)])
    text, cls = _tokenizer(random, size)
    (theirs / "tokenizer.json").write_text(text, encoding="utf-8")
    names = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>", "bos_token": "<s>"}
    more: dict[str, Any] = {"backend": "tokenizers", "is_local": True, "model_max_length": random.choice([512, 10**30])}
    more |= {"extra_special_tokens": random.choice([[], ["<extra_id_0>"], {"a": "b"}]), "tokenizer_class": cls}
    (theirs / "tokenizer_config.json").write_text(json.dumps({**names, **more}), encoding="utf-8")
    if random.random() < 0.5:
        of_another_type(random, random.choice(sorted(theirs.glob("*.json"))))


def _tokenizer(random: Random, size: int) -> tuple[str, str]:
    """The text of a tokenizer.json of so many tokens, and the class that version 5 calls it."""
    special, letters = ["<pad>", "</s>", "<unk>", "<s>", "<mask>"], "abcdefghij"
    words = [f"{a}{b}{c}" for a in letters for b in letters for c in ["", *letters]]
    texts = [*special, *("\u2581", *letters), *words, *(f"<extra_{i}>" for i in range(max(0, size)))][: max(20, size)]
    kind = random.choice(["unigram", "bpe", "wordpiece"])
    if kind == "unigram":
        made = tokenizers.Tokenizer(tokenizers.models.Unigram([(text, -float(i)) for i, text in enumerate(texts)], 2))
        made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
        made.decoder = tokenizers.decoders.Metaspace()
        name = random.choice(["T5Tokenizer", "NllbTokenizer", "MBartTokenizer"])
    elif kind == "bpe":
        made = tokenizers.Tokenizer(tokenizers.models.BPE({text: i for i, text in enumerate(texts)}, [("a", "a")]))
        made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder, name = tokenizers.decoders.ByteLevel(), "BartTokenizer"
    else:
        vocabulary = {text: i for i, text in enumerate(texts)}
        made = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocabulary, unk_token="<unk>"))
        made.normalizer, name = tokenizers.normalizers.BertNormalizer(), "BertTokenizer"
    ends = [("<s>", 3), ("</s>", 1)]
    single = random.choice(["$A </s>", "<s> $A </s>", "</s> $A"])
    made.post_processor = tokenizers.processors.TemplateProcessing(single=single, special_tokens=ends)
    made.add_special_tokens([text for text in special if text in texts])
    return made.to_str(), random.choice([name, "TokenizersBackend"])


def bombed(random: Random, folder: Path) -> None:
    """One of the files of a model becomes one that would take far more memory than it has on the disk."""
    files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
    path = random.choice([file for file in files if file.suffix in (".bin", ".npz", ".safetensors")] * 4 + files)
    random.choice([_hole_behind, _directory, _zip64, _deflated, _overlapping, _hole_within])(random, path)


def _hole_behind(random: Random, path: Path) -> None:
    os.truncate(path, random.choice([60 << 20, 1 << 30, HUGE, 1 << 40]))


def _hole_within(random: Random, path: Path) -> None:
    """The file's begin, a hole, and its end; of safetensors with a tensor that is the hole."""
    data = path.read_bytes()
    if path.suffix == ".safetensors":
        size = struct.unpack("<Q", data[:8])[0]
        header = json.loads(data[8 : 8 + size])
        name = random.choice([key for key in header if key != "__metadata__"])
        end = max(entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__")
        new = random.choice([name, "another", "1.weight"])
        header[new] = {"dtype": "F32", "shape": [HUGE // 4], "data_offsets": [end, end + HUGE]}
        text = json.dumps(header).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])
        os.truncate(path, path.stat().st_size + HUGE)
        return
    at = random.randrange(len(data) + 1)
    with path.open("wb") as file:
        file.write(data[:at])
        file.seek(HUGE, 1)
        file.write(data[at:] or b"\0")


def _directory(random: Random, path: Path) -> None:
    """An archive that says that its list of entries is all of a hole."""
    size = random.choice([HUGE, (1 << 32) - 2])
    with path.open("wb") as file:
        file.seek(size)
        file.write(struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 1, 1, size, 0, 0))


def _zip64(random: Random, path: Path) -> None:
    """An archive whose 64-bit fields lie."""
    size, begin = (random.choice([0, 1, 1 << 31, 1 << 40, 1 << 62, (1 << 63) - 1, (1 << 64) - 1]) for _ in range(2))
    end = struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, 1, 1, size, begin)
    locator = struct.pack("<4sLQL", b"PK\6\7", 0, random.choice([4, 104, 1 << 62]), 1)
    last = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
    path.write_bytes(b"PK\3\4" + bytes(100) + end + locator + last)


def _parts(path: Path) -> dict[str, bytes]:
    if not zipfile.is_zipfile(path):
        return {"archive/data.pkl": b"\x80\x02}.", "Wemb.npy": b""}
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def _deflated(random: Random, path: Path) -> None:
    """An archive with a part that is a thousand times larger than its bytes, or an archive in it."""
    parts, method = _parts(path), random.choice([zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
    name = random.choice([*parts, "archive/data/99", "another.npy"])
    with zipfile.ZipFile(path, "w", method) as archive:
        for part, contents in parts.items():
            if part != name:
                archive.writestr(part, contents)
        with archive.open(name, "w") as file:
            shape = (random.choice([1, 10, 25]) * 1_000_000, 1)
            text = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
            file.write(b"\x93NUMPY\1\0" + struct.pack("<H", len(text)) + text.encode())
            for _ in range(shape[0] // 250_000):
                file.write(bytes(1_000_000))


def _overlapping(random: Random, path: Path) -> None:
    """An archive whose list names one part many times, or says another size of it."""
    parts = _parts(path)
    with zipfile.ZipFile(path, "w") as archive:
        for part, contents in parts.items():
            archive.writestr(part, contents)
        entries = list(archive.filelist)
        for i in range(random.choice([1, 100, 20_000])):
            copy = zipfile.ZipInfo(f"archive/data/{i}" if random.random() < 0.5 else f"{i}.npy")
            source = random.choice(entries)
            copy.header_offset, copy.CRC = source.header_offset, source.CRC
            copy.file_size = copy.compress_size = random.choice([source.file_size, 1 << 33, 1 << 62])
            archive.filelist.append(copy)


def mixed(random: Random, folder: Path) -> None:
    """The graphs of one export beside the description and the vocabulary of another."""
    ours, others = folder / "onnx", folder / "other-onnx"
    files = [file for file in sorted(others.rglob("*")) if file.is_file()]
    graphs = [file for file in files if file.parent.name == "onnx"]
    chosen = random.choice([graphs, [file for file in files if file not in graphs], [random.choice(files)]])
    for file in chosen:
        shutil.copyfile(file, ours / file.relative_to(others))


def poisoned(random: Random, folder: Path) -> None:
    """The Hub's cache, with one link, reference or file that leads elsewhere."""
    cache = folder / "hub" / "models--org--name"
    snapshot, reference = cache / "snapshots" / COMMIT, cache / "refs" / "main"
    file = random.choice(sorted(snapshot.iterdir()))
    secret = folder / "secret"
    secret.write_text("a line of a stranger's", encoding="utf-8")

    def links(to: object) -> Any:
        return lambda: [file.unlink(), file.symlink_to(str(to))]

    def writes(path: Path, contents: bytes) -> Any:
        return lambda: path.write_bytes(contents)

    random.choice(
        [
            *(links(to) for to in (secret, "/etc/passwd", "../../../../../secret", file.name, "nothing", "/dev/zero")),
            *(links(to) for to in (folder / "theirs" / file.name, ".", "../../blobs")),
            *(writes(reference, b) for b in (b"", b"../../x", b"/etc", b"\xff\xfe", b"..", b"x" * 9000, b"a\0b")),
            lambda: [reference.unlink(), reference.mkdir()],
            lambda: [reference.unlink(), reference.symlink_to("main")],
            lambda: os.truncate(reference, HUGE),
            lambda: [shutil.rmtree(snapshot), snapshot.write_bytes(b"no folder")],
            lambda: [shutil.rmtree(snapshot), snapshot.symlink_to(folder / "theirs")],
            lambda: shutil.rmtree(cache / "blobs"),
            lambda: damage.to_no_file(random, random.choice(sorted((cache / "blobs").iterdir()))),
            lambda: damage.in_json_file(random, (snapshot / "config.json").resolve()),
        ]
    )()


def from_hub(random: Random, folder: Path) -> Attempt:
    """A model by its name, of which nobody can be asked."""
    import_it = random.random() < 0.5

    def python() -> object:
        os.environ |= {"HF_HUB_CACHE": str(folder / "hub"), "HF_HUB_OFFLINE": "1"}
        from mlx_transformer import load
        from mlx_transformer.convert import import_huggingface

        if not import_it:
            return load("org/name")[0].generate([[5, 6, 2]], max_new_tokens=2)
        notes = import_huggingface("org/name", folder / "new")
        for file in (folder / "new").iterdir():
            assert b"stranger" not in file.read_bytes(), file
        return notes

    return python


INFO, VERBS = "info {f}/onnx", (("import", " {f}/new"), ("import", " {f}/new"), ("info", ""))

FOREIGN = (
    Class(
        "folder of sentence-transformers",
        ("of-sentences",),
        one_of(
            *[on("of-sentences/**/*.json", of_another_type)] * 3,
            *(on("of-sentences/**/*.json", damage.in_json_file), on("of-sentences/**/*", damage.to_no_file)),
        ),
        ("import {f}/of-sentences {f}/new", "info {f}/of-sentences", "embed {f}/of-sentences one"),
        25,
    ),
    *(
        Class(
            f"values of another type, {name}",
            (f"of-{name}",),
            on(f"of-{name}/**/*.json", of_another_type),
            (f"import {{f}}/of-{name} {{f}}/new",),
            5,
        )
        for name in ("t5", "nllb", "bart", "opus", "tokens")
    ),
    Class("saved by transformers 5", (), saved_by_5, ("import {f}/of-5 {f}/new", "info {f}/of-5"), 25),
    *(
        Class(f"holes and bombs, {name}", (name,), bombed, tuple(f"{verb} {{f}}/{name}{new}" for verb, new in VERBS), 6)
        for name in ("of-torch", "of-marian", "of-marian-npz", "of-t5", "of-sentences")
    ),
    Class("holes and bombs, onnx", ("onnx", "in.txt"), bombed, ("translate {f}/onnx --input {f}/in.txt", INFO), 6),
    Class(
        "digests: folders mixed of two exports",
        ("onnx", "other-onnx", "in.txt"),
        mixed,
        ("translate {f}/onnx --input {f}/in.txt", "info {f}/onnx"),
        5,
        told=True,
    ),
    Class("cache of the Hub", ("hub", "theirs"), poisoned, from_hub, 20),
)
