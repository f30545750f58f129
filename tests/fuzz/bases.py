"""Whole models and runs of a few kilobytes, of every kind that a command reads, to be damaged."""

from __future__ import annotations

import gzip
import io
import json
import shutil
import sys
from contextlib import redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import published_text
import torch_archives
import two_vocabularies
from command_line import ending_model
from foreign_json import BGE, write_sentences
from hub_server import COMMIT
from makers_tokenizers import makers_json
from marian_models import KINDS, STUDENT, write_model
from safetensors.numpy import load_file
from tiny_run import write_pairs, write_recipe
from tokenizers.pre_tokenizers import ByteLevel
from web_package import write_web_package

from export import export_onnx, export_search
from mlx_transformer import Transformer, cli
from mlx_transformer.convert import import_huggingface, import_marian, to_gguf, to_huggingface
from mlx_transformer.convert.quantize import quantize_checkpoint
from mlx_transformer.core.checkpoint import save_checkpoint
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.heads import Head
from mlx_transformer.core.quantization import Scheme
from mlx_transformer.core.text_embedding import TextEmbedding
from mlx_transformer.core.tokenizer_files import CHAT_TEMPLATE
from mlx_transformer.families.llama import LLAMA
from mlx_transformer.system.manifest import sha256
from mlx_transformer.text.tokenizer import Tokenizer
from mlx_transformer.training.trainer import Trainer

TEXT = "one two three\n\nfour. five, six!\nseven\n"
HEADS = (
    Head(kind="classes", labels=("bad", "good")),
    Head(kind="token-classes", labels=("O", "B-X", "I-X")),
    Head(kind="spans"),
)
RANKS = Head(kind="classes", labels=("relevance",))
CHAT = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ m.name | upper }}\n{% endfor %}"
MODELS = ("model", "onnx", "cpu", "quantized")


def make(folder: Path) -> None:
    """FOLDER/model, onnx, cpu, int8, foreign (an ONNX folder without a description of ours), alone
    (a decoder that chats), alone-onnx, encoder, encoder-onnx, by the kinds of `HEADS` encoders with a head and their
    exports, ranks (one class), vectors (with an embedding.json) and theirs, of-tokens (bge-m3's form, pickles of the
    heads that tokens have), tokens (imported from it) and theirs, page (target web, with attention), node_modules
    (a site's), quantized, other and other-onnx (another
    model of the same vocabulary), theirs, hub (the Hub's cache with it), of-sentences (every file of
    sentence-transformers), of-torch and of-old-torch (the same in pickles), of-marian and of-marian-npz
    (Marian's own files), student (the former as a checkpoint), of-t5, of-nllb, of-bart and of-opus (folders with
    their makers' vocabularies), run, adapted (a run of LoRA), kept (its change beside quantized's integers),
    packed, two (vocabularies), two-onnx, ids.onnx, text.onnx, recipe.toml, text and pairs in all forms, in.txt and
    expected.json: what the models make of in.txt."""
    tokenizer = Tokenizer.train(["one two three. four five, six! seven " * 3], vocab_size=280)
    sizes: dict[str, Any] = {
        "encoder_layers": 1,
        "decoder_layers": 1,
        "d_model": 32,
        "heads": 2,
        "d_ff": 32,
        "max_positions": 40,
    }
    model = ending_model(tokenizer, **sizes)
    save_checkpoint(folder / "model", model.config, model.weights(), tokenizer.to_json())
    export_onnx(folder / "model", folder / "onnx")
    export_onnx(folder / "model", folder / "cpu", target="cpu")
    export_onnx(folder / "model", folder / "int8", precision=["float32", "int8", "int4"], target="cpu")
    export_search(folder / "model", folder / "ids.onnx")
    shutil.copytree(folder / "onnx", folder / "foreign", ignore=shutil.ignore_patterns("m*.json"))
    rotary = {"architecture": "decoder", "encoder_layers": 0, "tie_embeddings": "none", "positions": "rotary"}
    alone = Transformer(TransformerConfig(vocab_size=tokenizer.vocab_size, **{**sizes, **rotary}))
    texts = {CHAT_TEMPLATE: CHAT}
    save_checkpoint(folder / "alone", alone.config, alone.weights(), tokenizer.to_json(), texts=texts)
    export_onnx(folder / "alone", folder / "alone-onnx")
    masked = {"architecture": "encoder", "decoder_layers": 0}
    encoder = Transformer(TransformerConfig(vocab_size=tokenizer.vocab_size, **{**sizes, **masked}))
    save_checkpoint(folder / "encoder", encoder.config, encoder.weights(), tokenizer.to_json())
    export_onnx(folder / "encoder", folder / "encoder-onnx")
    for head in HEADS:
        config = TransformerConfig(vocab_size=tokenizer.vocab_size, head=head, **{**sizes, **masked})
        save_checkpoint(folder / head.kind, config, Transformer(config).weights(), tokenizer.to_json())
        export_onnx(folder / head.kind, folder / f"{head.kind}-onnx")
    config = TransformerConfig(vocab_size=tokenizer.vocab_size, head=RANKS, **{**sizes, **masked})
    save_checkpoint(folder / "ranks", config, Transformer(config).weights(), tokenizer.to_json())
    export_onnx(folder / "ranks", folder / "ranks-onnx")
    vectors = TextEmbedding(normalize=True, prompts={"query": "one: "})
    config = TransformerConfig(vocab_size=tokenizer.vocab_size, head=Head(kind="hidden"), **{**sizes, **masked})
    weights = Transformer(config).weights()
    save_checkpoint(folder / "vectors", config, weights, tokenizer.to_json(), texts=vectors.texts())
    export_onnx(folder / "vectors", folder / "vectors-onnx")
    shutil.copytree(BGE, folder / "of-tokens", ignore=shutil.ignore_patterns("answers.npz"))
    import_huggingface(folder / "of-tokens", folder / "tokens")
    export_onnx(folder / "tokens", folder / "tokens-onnx")
    export_onnx(folder / "model", folder / "page", target="web", attention=True)
    write_web_package(folder / "node_modules")
    if find_spec("onnxruntime_extensions"):
        export_search(folder / "model", folder / "text.onnx", text=True)
    quantize_checkpoint(folder / "model", folder / "quantized", Scheme(32, 4))
    other = ending_model(tokenizer, **{**sizes, "d_ff": 48})
    save_checkpoint(folder / "other", other.config, other.weights(), tokenizer.to_json())
    export_onnx(folder / "other", folder / "other-onnx")
    to_huggingface(folder / "model", folder / "theirs")
    write_sentences(folder / "of-sentences")
    write_cache(folder / "hub", folder / "theirs")
    for name in ("of-torch", "of-old-torch"):
        shutil.copytree(folder / "theirs", folder / name)
        weights = folder / name / "model.safetensors"
        torch_archives.save(folder / name / "pytorch_model.bin", load_file(weights), legacy=name == "of-old-torch")
        weights.unlink()
    write_published(folder)
    write_gguf(folder)
    write_model(folder / "of-marian", STUDENT, integers=True)
    write_model(folder / "of-marian-npz", KINDS["two vocabularies"])
    import_marian(folder / "of-marian", folder / "student")
    (folder / "in.txt").write_text(TEXT, encoding="utf-8")
    write_pairs(folder)
    write_recipe(folder, steps=2, checkpoint_seconds=0)
    call("train", folder / "recipe.toml", "--out", folder / "run")
    shutil.rmtree(folder / "run" / "tensorboard", ignore_errors=True)
    start = ["--from", folder / "model", "--source", folder / "0.source", "--target", folder / "0.target"]
    call("train", *start, "--adapter", "lora", "--adapter-rank", 2, "--steps", 2, "--out", folder / "adapted")
    start[1] = folder / "quantized"
    call("train", *start, "--adapter", "dora", "--adapter-rank", 2, "--steps", 1, "--out", folder / "of-integers")
    call("merge", folder / "quantized", folder / "of-integers", "--keep-adapter", "--out", folder / "kept")
    export_onnx(folder / "kept", folder / "packed", precision="packed")
    (folder / "words").mkdir()
    two = Trainer(two_vocabularies.recipe(folder / "words", steps=1), folder / "words" / "run").run()
    shutil.copytree(two.model, folder / "two")
    export_onnx(folder / "two", folder / "two-onnx")
    write_texts(folder)
    expected = {name: call("translate", folder / name, "--input", folder / "in.txt") for name in MODELS}
    (folder / "expected.json").write_text(json.dumps(expected), encoding="utf-8")


def write_gguf(folder: Path) -> None:
    """of-llama (a checkpoint with a maker's tokenizer), and as llama.cpp's files f32.gguf and q8_0.gguf."""
    text, size = makers_json("smollm2"), 400
    sizes = {"vocab_size": size, "d_model": 64, "heads": 4, "key_value_heads": 2, "d_ff": 96, "decoder_layers": 1}
    ids = {"pad_id": 3, "bos_id": 1, "eos_id": 2, "max_positions": 64, "activation": "silu"}
    config = TransformerConfig.from_dict({**LLAMA.ours, **sizes, **ids, "tie_embeddings": "target-output"})
    save_checkpoint(folder / "of-llama", config, Transformer(config).weights(), text)
    for kind in ("f32", "q8_0"):
        to_gguf(folder / "of-llama", folder / f"{kind}.gguf", kind)


def write_published(folder: Path) -> None:
    """of-t5, of-nllb, of-bart and of-opus: published translators whose vocabularies are as their makers ship them."""
    names, stacks = published_text.two_languages()[0], published_text.STACKS
    model = published_text.trained(names, size=300)
    pieces = published_text.text_pieces(model)
    own = published_text.trained(names, size=300, pad_id=0, eos_id=1, unk_id=2, bos_id=-1)
    ids = dict(pad_token_id=0, eos_token_id=1, decoder_start_token_id=0)
    published_text.write_model(
        folder / "of-t5",
        {"model_type": "t5", **published_text.T5, **ids, "vocab_size": 420},
        spiece__model=own,
        tokenizer_config__json={"extra_ids": 100, "pad_token": "<pad>"},
    )
    fairseq = dict(pad_token_id=1, bos_token_id=0, eos_token_id=2, decoder_start_token_id=2)
    first = len(pieces) + 4
    published_text.write_model(
        folder / "of-nllb",
        {"model_type": "m2m_100", **stacks, **fairseq, "vocab_size": first + 20},
        sentencepiece__bpe__model=model,
        added_tokens__json={"eng_Latn": first, "deu_Latn": first + 1, "<mask>": first + 2},
        special_tokens_map__json={"additional_special_tokens": ["eng_Latn", "deu_Latn"]},
    )
    bytes_of_text = ["<s>", "<pad>", "</s>", "<unk>", *sorted(ByteLevel.alphabet()), "th", "the"]
    published_text.write_model(
        folder / "of-bart",
        {"model_type": "bart", **stacks, **fairseq, "vocab_size": len(bytes_of_text)},
        vocab__json={token: id for id, token in enumerate(bytes_of_text)},
        merges__txt="#version: 0.2\nt h\nth e\n",
    )
    tokens = ["</s>", "<unk>", *pieces, ">>deu<<", "<pad>"]
    last = len(tokens) - 1
    published_text.write_model(
        folder / "of-opus",
        {"model_type": "marian", **stacks, "vocab_size": len(tokens), "pad_token_id": last, "eos_token_id": 0}
        | dict(decoder_start_token_id=last),
        source__spm=model,
        target__spm=model,
        vocab__json={token: id for id, token in enumerate(tokens)},
    )


def write_cache(hub: Path, model: Path) -> None:
    """The cache of the Hub's library with one model, org/name: blobs, links to them, and the commit of its branch."""
    cache = hub / "models--org--name"
    snapshot = cache / "snapshots" / COMMIT
    for place in (snapshot, cache / "blobs", cache / "refs"):
        place.mkdir(parents=True)
    for file in sorted(model.iterdir()):
        blob = cache / "blobs" / sha256(file)
        shutil.copyfile(file, blob)
        (snapshot / file.name).symlink_to(f"../../blobs/{blob.name}")
    (cache / "refs" / "main").write_text(COMMIT, encoding="ascii")


def write_texts(folder: Path) -> None:
    """plain.txt, text.jsonl, labelled.jsonl, and pairs as .tsv, .tsv.gz, .jsonl; with pyarrow also as .parquet."""
    lines = [f"one two {i} three" for i in range(60)]
    (folder / "plain.txt").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    rows = [{"text": line} if i % 2 else {"prompt": line, "completion": "four"} for i, line in enumerate(lines)]
    (folder / "text.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    pairs = [{"source": line, "target": line.upper()} for line in lines]
    (folder / "pairs.jsonl").write_text("".join(f"{json.dumps(pair)}\n" for pair in pairs), encoding="utf-8")
    labelled = [{"text": line, "text_pair": line.upper(), "score": i % 2} for i, line in enumerate(lines)]
    (folder / "labelled.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in labelled), encoding="utf-8")
    table = "".join(f"{line}\t{line.upper()}\n" for line in lines).encode()
    (folder / "pairs.tsv").write_bytes(table)
    (folder / "pairs.tsv.gz").write_bytes(gzip.compress(table))
    if find_spec("pyarrow"):
        from pyarrow import Table, parquet

        parquet.write_table(Table.from_pylist(pairs), folder / "pairs.parquet")


def call(*arguments: object) -> str:
    """Standard output of a command, which must end well."""
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    with redirect_stdout(out):
        cli.main([str(argument) for argument in arguments])
    out.seek(0)
    return out.read()


if __name__ == "__main__":
    make(Path(sys.argv[1]))
