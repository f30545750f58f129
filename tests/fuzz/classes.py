"""What is damaged, and which commands read it afterwards; further.py has the commands beside the main path."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import damage
import graphs
from asked import asked
from attempts import TRAIN, from_python, numbers, paths, search_model
from damage import NUMBERS
from foreign import FOREIGN
from further import FURTHER, in_one
from injected import INJECTED
from kind import Class, digests, nothing, on, one_of
from vocabularies import VOCABULARIES

MODEL = (
    *("translate {f}/model --input {f}/in.txt",) * 4,
    *(
        "info {f}/model",
        "export {f}/model {f}/new",
        "quantize {f}/model {f}/new --group-size 32",
        "validate {f}/model {f}/onnx",
    ),
    *(
        "to-huggingface {f}/model {f}/new",
        "export {f}/model {f}/new.onnx --embed-tokenizer",
        "export {f}/model {f}/new --precision int8",
    ),
    "evaluate {f}/model --source {f}/in.txt --reference {f}/in.txt --beam 2",
)


def onnx_commands(name: str) -> tuple[str, ...]:
    """Commands that read the ONNX folder of that name."""
    here = f"{{f}}/{name}"
    return (
        *(f"translate {here} --input {{f}}/in.txt",) * 4,
        *(f"info {here}", f"validate {{f}}/model {here}", f"translate {here} --input {{f}}/in.txt --beam 3"),
        f"translate {here} --input {{f}}/in.txt --stream",
    )


def _recipe(random: Random, path: Path) -> None:
    if random.random() < 0.25:
        path.write_bytes(damage.in_bytes(random, path.read_bytes()))
        return
    lines = path.read_text(encoding="utf-8").splitlines()
    values = [str(n) for n in NUMBERS if n == n and abs(n) < 1e308 and (isinstance(n, float) or n < 10**300)]
    values += ["nan", "-inf", "true", "[]", "{}", "''", '"\\u0000"', '"x"', "1979-05-27", "[[[[1]]]]", '"../../x"', ""]
    for _ in range(random.choice([1, 1, 2])):
        i = random.randrange(len(lines))
        key = lines[i].split(" = ")[0]
        lines[i] = random.choice([f"{key} = {random.choice(values)}"] * 6 + ["", lines[i] * 2, key, lines[i - 1]])
    keys = [
        "d_model",
        "heads",
        "d_k",
        "d_v",
        "d_ff",
        "encoder_layers",
        "max_positions",
        "positions",
        "norm",
        "vocab_size",
    ]
    if random.random() < 0.3:
        place = next((i for i, line in enumerate(lines) if line == "[model]"), 0)
        lines.insert(place + 1, f"{random.choice(keys)} = {random.choice(values)}")
    path.write_text("\n".join(lines), encoding="utf-8")


def _odd_files(random: Random, folder: Path) -> None:
    if random.random() < 0.5:
        for file in folder.rglob("manifest.json"):
            file.unlink()
    damage.to_no_file(random, random.choice([file for file in sorted(folder.rglob("*")) if file.is_file()]))


def _run_folder(random: Random, folder: Path) -> None:
    files = [file for file in sorted((folder / "run").rglob("*")) if file.is_file()]
    if random.random() < 0.5:
        for file in folder.rglob("manifest.json"):
            file.unlink()
        files = [file for file in files if file.exists()]
    path = random.choice([folder / "run" / "run.json", *files])
    if path.suffix == ".safetensors":
        damage.in_safetensors(random, path)
    elif path.suffix == ".json":
        damage.in_json_file(random, path)
    else:
        damage.in_text(random, path)
    if random.random() < 0.3 and path.name == "run.json":
        record = folder / "run" / "run.json"
        record.write_text(
            json.dumps({"recipe": damage.in_json(random, {"preset": "tiny", "model": {}})}), encoding="utf-8"
        )


ALL = (
    "model",
    "onnx",
    "cpu",
    "int8",
    "quantized",
    "theirs",
    "of-torch",
    "run",
    "ids.onnx",
    "recipe.toml",
    "in.txt",
    "0.source",
    "0.target",
)
TEXT = ("recipe.toml", "0.source", "0.target")
RESUME = ("train --resume {f}/run --steps 3", "train {f}/recipe.toml --out {f}/run --resume --steps 3", "info {f}/run")
ODD = (
    *MODEL,
    *onnx_commands("onnx"),
    *onnx_commands("int8"),
    *RESUME,
    TRAIN,
    "import {f}/theirs {f}/new",
    "info {f}/quantized",
)


CLASSES = (
    Class("config.json", ("model", "onnx", "in.txt"), on("model/config.json", damage.in_json_file), MODEL, 38),
    Class("safetensors", ("model", "onnx", "in.txt"), on("model/*.safetensors", damage.in_safetensors), MODEL, 20),
    Class("tokenizer.json", ("model", "onnx", "in.txt"), on("model/tokenizer.json", damage.in_json_file), MODEL, 32),
    Class(
        "manifest.json", ("model", "onnx", "in.txt"), on("model/manifest.json", damage.in_json_file, True), MODEL, 10
    ),
    Class("no regular files", ALL, _odd_files, ODD, 25),
    Class(
        "quantised checkpoint",
        ("quantized", "onnx", "in.txt"),
        one_of(on("quantized/config.json", damage.in_json_file), on("quantized/*.safetensors", damage.in_safetensors)),
        tuple(command.replace("{f}/model", "{f}/quantized") for command in MODEL),
        15,
    ),
    Class(
        "ONNX graphs", ("onnx", "model", "in.txt"), on("onnx/onnx/*.onnx", graphs.in_graph), onnx_commands("onnx"), 35
    ),
    Class("ONNX data", ("onnx", "model", "in.txt"), on("onnx/onnx/*_data", damage.in_text), onnx_commands("onnx"), 5),
    Class(
        "ONNX folder's JSON",
        ("onnx", "model", "in.txt"),
        on("onnx/*.json", damage.in_json_file),
        onnx_commands("onnx"),
        25,
    ),
    Class(
        "ONNX target cpu", ("cpu", "model", "in.txt"), on("cpu/onnx/*.onnx", graphs.in_graph), onnx_commands("cpu"), 15
    ),
    Class(
        "ONNX made elsewhere",
        ("foreign", "model", "in.txt"),
        on("foreign/*.json", damage.in_json_file),
        onnx_commands("foreign"),
        8,
    ),
    Class(
        "decoder alone",
        ("alone", "alone-onnx"),
        in_one("alone"),
        (
            "validate {f}/alone {f}/alone-onnx",
            "export {f}/alone {f}/new",
            "info {f}/alone-onnx",
            "quantize {f}/alone {f}/new",
        ),
        10,
    ),
    Class(
        "ONNX precisions",
        ("int8", "model", "in.txt"),
        on("int8/**/*.onnx", graphs.in_graph),
        tuple(f"translate {{f}}/int8 --input {{f}}/in.txt --precision {name}" for name in ("int8", "int4", "float32")),
        8,
    ),
    Class("single file", ("ids.onnx", "text.onnx", "model", "in.txt"), on("*.onnx", graphs.in_graph), search_model, 25),
    Class(
        "Marian folder",
        ("theirs",),
        one_of(*[on("theirs/*.json", damage.in_json_file)] * 3, on("theirs/*.safetensors", damage.in_safetensors)),
        ("import {f}/theirs {f}/new",),
        20,
    ),
    Class(
        "PyTorch's weights",
        ("of-torch",),
        on("of-torch/*.bin", damage.in_archive),
        ("import {f}/of-torch {f}/new",),
        20,
    ),
    Class(
        "PyTorch's older weights",
        ("of-old-torch",),
        on("of-old-torch/*.bin", damage.in_legacy),
        ("import {f}/of-old-torch {f}/new",),
        20,
    ),
    Class(
        "GGUF",
        ("f32.gguf", "q8_0.gguf"),
        one_of(*[on("*.gguf", damage.in_gguf)] * 9, on("*.gguf", damage.to_no_file)),
        ("import {f}/f32.gguf {f}/new", "import {f}/q8_0.gguf {f}/new", "info {f}/q8_0.gguf"),
        30,
    ),
    Class(
        "Marian's own files",
        ("of-marian", "of-marian-npz"),
        one_of(
            *[on("of-marian*/*model.*", damage.in_marian)] * 3,
            *(on("of-marian*/*.spm", damage.in_marian), on("of-marian*/lex*", damage.in_marian)),
            *(on("of-marian*/*.yml", damage.in_text), on("of-marian*/*", damage.to_no_file)),
        ),
        ("import {f}/of-marian {f}/new", "import {f}/of-marian-npz {f}/new"),
        30,
    ),
    *(
        Class(
            f"published vocabulary, {name}",
            (f"of-{name}",),
            one_of(
                *[on(f"of-{name}/{files}", damage_of)] * 3,
                *(on(f"of-{name}/*.json", damage.in_json_file), on(f"of-{name}/*", damage.to_no_file)),
            ),
            (f"import {{f}}/of-{name} {{f}}/new",),
            10,
        )
        for name, files, damage_of in (
            ("t5", "*.model", damage.in_marian),
            ("nllb", "*.model", damage.in_marian),
            ("bart", "merges.txt", damage.in_text),
            ("opus", "*.spm", damage.in_marian),
        )
    ),
    Class(
        "student of Marian",
        ("student", "in.txt"),
        one_of(
            *[on("student/*.json", damage.in_json_file)] * 3,
            *(on("student/*.bin", damage.in_marian), on("student/*.spm", damage.in_marian)),
            on("student/*.safetensors", damage.in_safetensors),
        ),
        ("to-marian {f}/student {f}/new", "translate {f}/student --input {f}/in.txt", "info {f}/student"),
        20,
    ),
    Class("recipe", TEXT, on("recipe.toml", _recipe), (TRAIN,), 36),
    Class("training text", TEXT, on("0.*", damage.in_text), (TRAIN,), 8),
    Class("run, --resume", ("run", *TEXT), _run_folder, RESUME, 30),
    Class("numbers", ALL, nothing, numbers, 75),
    Class("paths", ALL, nothing, paths, 20),
    Class("from Python", ("text.onnx", "ids.onnx", "onnx", "cpu", "model"), nothing, from_python, 20),
    Class("requests", ("onnx", "vectors-onnx", "ranks-onnx", "alone-onnx"), nothing, asked, 20),
    digests("checkpoint", ("model", "onnx", "in.txt"), "model/*.safetensors", MODEL[:4]),
    digests("ONNX", ("onnx", "in.txt"), "onnx/onnx/model.*", onnx_commands("onnx")[:4]),
    digests("ONNX JSON", ("onnx", "in.txt"), "onnx/[mt]*r.json", onnx_commands("onnx")[:4]),
    *FURTHER,
    *FOREIGN,
    *VOCABULARIES,
    *INJECTED,
)
