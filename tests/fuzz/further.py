"""What is damaged, and which commands read it, beside the main path: decoders and encoders alone, adapters, two
vocabularies, pages, comparisons, scores, and every way that text comes in."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from random import Random

import damage
import graphs
from attempts import TRAIN, Attempt, with_odd_values
from damage import NUMBERS
from kind import Class, nothing, on, one_of

from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.system.fields import field_types
from mlx_transformer.training.options import DataOptions, TrainingOptions
from mlx_transformer.training.recipe import Recipe

PAGES = (
    *("explain {f}/model one --out {f}/new.html", "explain {f}/onnx one --beam 3 --out {f}/new.html"),
    *("explain {f}/model one --with {f}/onnx --out {f}/new.html", "explain {f}/cpu one --figures {f}/new"),
    "compare {f}/model {f}/onnx --source {f}/in.txt --out {f}/new.html",
    "compare {f}/onnx {f}/cpu --source {f}/in.txt --reference {f}/in.txt --json {f}/new.json --out {f}/new.html",
    *(f"score {{f}}/{name} --source {{f}}/in.txt --reference {{f}}/in.txt" for name in ("model", "onnx", "cpu")),
    *("translate {f}/model --input {f}/in.txt --alignment", "translate {f}/page --input {f}/in.txt --alignment"),
    *("web {f}/page --out {f}/new --assets {f}/node_modules", "validate {f}/model {f}/page"),
)
ADAPTER = (
    *("merge {f}/model {f}/adapted --out {f}/new", "merge {f}/model {f}/adapted/adapter --out {f}/new"),
    *("info {f}/adapted", "info {f}/adapted/adapter", "translate {f}/adapted --input {f}/in.txt"),
    *("export {f}/adapted {f}/new", "train --resume {f}/adapted --steps 3"),
)
KEPT = (
    *("translate {f}/kept --input {f}/in.txt", "translate {f}/packed --input {f}/in.txt --beam 2"),
    *("validate {f}/kept {f}/packed", "export {f}/kept {f}/new --precision packed", "info {f}/kept"),
    *("info {f}/packed", "merge {f}/quantized {f}/kept --out {f}/new"),
)
TWO = (
    *("translate {f}/two --input {f}/in.txt", "translate {f}/two-onnx --input {f}/in.txt", "info {f}/two"),
    *("export {f}/two {f}/new", "validate {f}/two {f}/two-onnx", "to-huggingface {f}/two {f}/new"),
    "score {f}/two --source {f}/in.txt --reference {f}/in.txt",
)
RUNS = (
    *("report {f}/run --out {f}/new.html", "report {f}/run {f}/adapted --out {f}/new.html", "info {f}/run"),
    "average {f}/run/checkpoints/step-00000001 {f}/run/checkpoints/step-00000002 --out {f}/new",
    "train --from {f}/run --source {f}/0.source --target {f}/0.target --out {f}/new --steps 1",
)
SIZES = "--preset tiny --vocab-size 280 --steps 1 --out {f}/new"
TEXTS = (
    *(f"train --objective language-model --text {{f}}/{name} {SIZES}" for name in ("plain.txt", "text.jsonl")),
    *(f"train --objective masked-language-model --text {{f}}/plain.txt {SIZES}",),
    *(f"train --objective denoising --text {{f}}/text.jsonl {SIZES}",),
    *(f"train --objective contrastive --pairs {{f}}/{name} {SIZES}" for name in ("pairs.tsv", "pairs.jsonl")),
    *(f"train --objective classification --labelled {{f}}/{name} {SIZES}" for name in ("labelled.jsonl", "pairs.tsv")),
    f"train --objective distillation --text {{f}}/plain.txt --teacher {{f}}/vectors --d-model 32 {SIZES}",
    *(f"train --pairs {{f}}/{name} {SIZES}" for name in ("pairs.tsv", "pairs.jsonl", "pairs.parquet", "pairs.tsv.gz")),
)


TABLES = {"data": DataOptions, "model": TransformerConfig, "training": TrainingOptions}
KEYS = [("model", "preset", Recipe.preset)]
KEYS += [
    (table, f.name, f.default) for table, kind in TABLES.items() for f in fields(kind) if f.name in field_types(kind)
]


def _every_key(random: Random, folder: Path) -> None:
    """One or two keys of all that a recipe may have."""
    path = folder / "recipe.toml"
    lines = path.read_text(encoding="utf-8").splitlines()
    for _ in range(random.choice([1, 1, 2])):
        table, key, default = random.choice(KEYS)
        values = [json.dumps(default) if isinstance(default, (str, int, float)) else '""'] * 3
        values += ["0", "1", "-1", "2", "3.5", "true", "false", '"x"', '""', "[]", "1e308", "nan"]
        values += [str(number) for number in NUMBERS if isinstance(number, int) and abs(number) < 10**30]
        lines = [line for line in lines if not line.startswith(f"{key} = ")]
        place = lines.index(f"[{table}]")
        lines.insert(place + 1, f"{key} = {random.choice(values)}")
    path.write_text("\n".join(lines), encoding="utf-8")


def more_numbers(random: Random, folder: Path) -> Attempt:
    """Commands with one or two options of unheard-of values."""
    here = str(folder)
    commands = [
        (
            f"explain {here}/model one --out {here}/new.html",
            "beam length-penalty max-new-tokens top-k runtime target",
        ),
        (f"explain {here}/onnx one --out {here}/new.html", "beam max-new-tokens top-k threads precision with"),
        ("claims 13 --out new.html", "figures lang"),
        (f"compare {here}/model {here}/onnx --source {here}/in.txt", "beam length-penalty max-new-tokens threads"),
        (f"generate {here}/alone one", "max-new-tokens min-new-tokens temperature top-k top-p seed beam stop"),
        (f"generate {here}/alone-onnx one", "max-new-tokens min-new-tokens beam stop threads precision"),
        (f"fill {here}/encoder one<mask>", "top-k backend"),
        (f"fill {here}/encoder-onnx one<mask>", "top-k threads precision"),
        (f"score {here}/onnx --source {here}/in.txt --reference {here}/in.txt", "threads precision overlong backend"),
        (f"export {here}/model {here}/new --attention", "attention-layer target precision"),
        (f"train {here}/recipe.toml --out {here}/new --steps 1", "accumulate memory precision optimizer schedule"),
        (
            f"train --from {here}/model --pairs {here}/pairs.tsv --steps 1 --out {here}/new",
            "rank alpha adapter-dropout targets freeze adapter final best patience",
        ),
        (
            f"train --objective contrastive --from {here}/vectors --pairs {here}/pairs.tsv --steps 1 --out {here}/new",
            "batch-pairs temperature chunk pooling source-prompt max-length teacher memory adapter best",
        ),
        (
            f"train --objective classification --labelled {here}/labelled.jsonl {SIZES.format(f=here)}",
            "batch-tokens max-length label-smoothing temperature best labelled valid-labelled",
        ),
        (f"embed {here}/vectors one", "dimensions pooling prompt prompt-name"),
        (f"embed {here}/vectors-onnx one", "dimensions pooling prompt prompt-name threads precision"),
        (f"rerank {here}/ranks --input {here}/pairs.tsv", "top-n runtime"),
        (f"evaluate {here}/vectors", "pairs similarity labelled text"),
        (f"train --text {here}/plain.txt {SIZES.format(f=here)}", "objective batch-tokens vocab-size dropout"),
    ]
    return with_odd_values(random, [(given, options.split()) for given, options in commands])


def in_one(name: str) -> Callable[[Random, Path], None]:
    """Damage to the checkpoint of that name, or to its export."""
    return one_of(
        *[on(f"{name}*/*.json", damage.in_json_file)] * 2,
        on(f"{name}/*.safetensors", damage.in_safetensors),
        on(f"{name}-onnx/onnx/*.onnx", graphs.in_graph),
    )


HEADED = {"classes": "classify", "token-classes": "tag", "spans": "answer", "ranks": "rerank"}
"""The commands of encoders with a head, by its kind."""
FURTHER = (
    Class(
        "encoder alone",
        ("encoder", "encoder-onnx"),
        in_one("encoder"),
        (
            *("fill {f}/encoder one<mask>three", "fill {f}/encoder-onnx one<mask>three", "info {f}/encoder-onnx"),
            *("validate {f}/encoder {f}/encoder-onnx", "explain {f}/encoder one --out {f}/new.html"),
            *("export {f}/encoder {f}/new", "translate {f}/encoder --input {f}/encoder/config.json"),
        ),
        20,
    ),
    Class(
        "heads of encoders",
        (*HEADED, *(f"{kind}-onnx" for kind in HEADED), "pairs.tsv"),
        one_of(*map(in_one, HEADED), on("pairs.tsv", damage.in_text)),
        tuple(
            f"{verb} {{f}}/{kind}{form} --input {{f}}/pairs.tsv"
            for kind, verb in HEADED.items()
            for form in ("", "-onnx")
        ),
        20,
    ),
    Class(
        "vectors of texts",
        ("vectors", "vectors-onnx", "pairs.tsv", "labelled.jsonl"),
        one_of(in_one("vectors"), on("pairs.tsv", damage.in_text), on("labelled.jsonl", damage.in_text)),
        (
            *(
                "embed {f}/vectors --input {f}/pairs.tsv",
                "embed {f}/vectors-onnx --input {f}/pairs.tsv --out {f}/new.npy",
            ),
            *(
                "evaluate {f}/vectors --pairs {f}/pairs.tsv",
                "evaluate {f}/vectors-onnx --similarity {f}/labelled.jsonl",
            ),
            *("export {f}/vectors {f}/new", "validate {f}/vectors {f}/vectors-onnx"),
            "train --objective contrastive --from {f}/vectors --pairs {f}/pairs.tsv --steps 1 --out {f}/new",
        ),
        20,
    ),
    Class(
        "weights and vectors of tokens",
        ("tokens", "tokens-onnx", "of-tokens"),
        one_of(
            *[on("of-tokens/*.pt", damage.in_archive)] * 3,
            *(on("of-tokens/**/*.json", damage.in_json_file), on("of-tokens/*", damage.to_no_file), in_one("tokens")),
        ),
        (
            *("import {f}/of-tokens {f}/new", "embed {f}/of-tokens one --kind sparse", "info {f}/tokens"),
            *(
                f"embed {{f}}/{name} one --kind {kind}"
                for name, kind in (("tokens", "sparse"), ("tokens-onnx", "multi"))
            ),
            "validate {f}/tokens {f}/tokens-onnx",
        ),
        25,
    ),
    Class(
        "decoder that goes on",
        ("alone", "alone-onnx"),
        in_one("alone"),
        (
            *("generate {f}/alone one --max-new-tokens 4", "generate {f}/alone-onnx one --max-new-tokens 4"),
            *("generate {f}/alone one two --beam 3 --json", "explain {f}/alone one --out {f}/new.html"),
            "explain {f}/alone-onnx one --out {f}/new.html",
        ),
        20,
    ),
    Class(
        "pages and scores",
        ("model", "onnx", "cpu", "page", "node_modules", "in.txt"),
        one_of(
            on("model/*.json", damage.in_json_file),
            on("model/*.safetensors", damage.in_safetensors),
            on("onnx/*.json", damage.in_json_file),
            *(on(f"{name}/onnx/*.onnx", graphs.in_graph) for name in ("onnx", "cpu", "page")),
            on("page/*.json", damage.in_json_file),
            on("in.txt", damage.in_text),
            on("node_modules/**/*", damage.in_text),
        ),
        PAGES,
        45,
    ),
    Class(
        "adapter",
        ("adapted", "model", "in.txt", "0.source", "0.target"),
        one_of(
            *[on("adapted/adapter/*.json", damage.in_json_file)] * 2,
            on("adapted/adapter/*.safetensors", damage.in_safetensors),
            on("adapted/**/*.json", damage.in_json_file),
            on("adapted/**/*.safetensors", damage.in_safetensors),
            on("model/config.json", damage.in_json_file),
        ),
        ADAPTER,
        25,
    ),
    Class(
        "adapter beside integers",
        ("kept", "packed", "quantized", "in.txt"),
        one_of(
            *[on("kept/*.json", damage.in_json_file)] * 2,
            on("kept/**/*.safetensors", damage.in_safetensors),
            on("packed/onnx/*.onnx", graphs.in_graph),
            on("packed/*.json", damage.in_json_file),
        ),
        KEPT,
        20,
    ),
    Class(
        "two vocabularies",
        ("two", "two-onnx", "in.txt"),
        one_of(
            *[on("two*/*_tokenizer.json", damage.in_json_file)] * 2,
            on("two*/*.json", damage.in_json_file),
            on("two*/**/*", damage.to_no_file),
        ),
        TWO,
        20,
    ),
    Class(
        "runs: reports, averages",
        ("run", "adapted", "0.source", "0.target"),
        one_of(
            *[on("run/*.jsonl", damage.in_text)] * 2,
            on("run/run.json", damage.in_json_file),
            on("run/**/*.json", damage.in_json_file),
            on("run/**/*.safetensors", damage.in_safetensors),
            on("adapted/run.json", damage.in_json_file),
        ),
        RUNS,
        25,
    ),
    Class(
        "every key of a recipe",
        ("recipe.toml", "0.source", "0.target"),
        _every_key,
        (TRAIN,),
        45,
    ),
    Class(
        "texts and pairs",
        ("plain.txt", "text.jsonl", "pairs.tsv", "pairs.jsonl", "pairs.parquet", "pairs.tsv.gz"),
        one_of(
            on("*", damage.in_text),
            on("pairs.*", lambda random, path: path.write_bytes(damage.in_bytes(random, path.read_bytes()))),
        ),
        TEXTS,
        30,
    ),
    Class(
        "more numbers",
        (
            *("model", "onnx", "in.txt", "alone", "alone-onnx", "encoder", "encoder-onnx"),
            *("recipe.toml", "0.source", "0.target", "plain.txt", "pairs.tsv"),
        ),
        nothing,
        more_numbers,
        70,
    ),
)
