"""Peak memory of import and export, in multiples of the weights, of published models with random weights.

    PYTHONPATH=.:tests/helpers python benchmarks/memory.py [--exports cpu:float32 web:int4] [--families marian t5]

Each step runs in a process of its own. Its peak is the resident set (VmHWM, on Linux) less that of the same step on a
tiny model: what the interpreter, its imports and the graph take. The weights are those of the checkpoint in float32.
The exit status is 1 if a step takes more than 1.2 times as much.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
from engines.process import last_line

from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.parameters import parameter_count
from mlx_transformer.system.tensors import read_tensors, write_tensors
from mlx_transformer.text.sentencepiece import NORMAL, Piece, SentencePiece

LIMIT = 1.2
EXPORTS = ["portable:float32", "cpu:float32", "cpu:int8", "web:float16", "web:int8", "web:int4"]
EXPORTS += ["search cpu:float32", "search cpu:int8"]
STEP = """
import sys
from pathlib import Path
step, source, out, *more = sys.argv[1:]
if step == "import":
    from mlx_transformer.convert import import_huggingface
    import_huggingface(source, out, force=True)
elif step == "import of Marian's":
    from mlx_transformer.families.marian_files.conversion import import_marian
    import_marian(source, out, force=True)
elif step == "to-huggingface":
    from mlx_transformer.convert import to_huggingface
    to_huggingface(source, out, force=True)
elif step == "to-marian":
    from mlx_transformer.convert import to_marian
    to_marian(source, out, force=True)
else:
    from export import export_onnx, export_search
    write, name = (export_search, f"{out}.onnx") if step == "search" else (export_onnx, out)
    write(source, name, target=more[0], precision=more[1], force=True, accept_loss=True)
print(1024 * int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]))
"""


def vocabulary(few: SentencePiece, size: int) -> SentencePiece:
    """As many pieces as a model has rows, these few the first."""
    more = (Piece(f"▁w{i}", -20.0, NORMAL) for i in range(size - len(few.pieces)))
    return replace(few, pieces=(*few.pieces, *more))


def configs(large: bool) -> dict[str, dict]:
    d, ff, layers, size = (768, 3072, 3, 32000) if large else (16, 32, 1, 80)
    heads = dict(encoder_attention_heads=8, decoder_attention_heads=8, max_position_embeddings=64, d_model=d)
    stacks = dict(encoder_layers=layers, decoder_layers=layers, encoder_ffn_dim=ff, decoder_ffn_dim=ff)
    bart = {**heads, **stacks, "tie_word_embeddings": True, "vocab_size": size}
    marian = {**bart, "model_type": "marian", "pad_token_id": size - 1, "decoder_start_token_id": size - 1}
    t5 = dict(d_model=d, d_kv=d // 8, num_heads=8, d_ff=ff, num_layers=layers, num_decoder_layers=layers)
    ids = dict(pad_token_id=0, eos_token_id=1, decoder_start_token_id=0, vocab_size=size)
    rows = dict(vocab_size=64000 if large else size, pad_token_id=1, bos_token_id=0, eos_token_id=2)
    nllb = {**bart, "model_type": "m2m_100", **rows, "decoder_start_token_id": 2}
    small = dict(d_model=512, encoder_layers=2, decoder_layers=2, encoder_ffn_dim=2048, decoder_ffn_dim=2048)
    return {
        "marian": {**marian, "eos_token_id": 0},
        "t5": {"model_type": "t5", **t5, **ids, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
        "nllb": nllb,
        "rows": {**nllb, **small, "vocab_size": 128_000} if large else nllb,  # 82 % of its weights are the embedding's
    }


def written(folder: Path, family: str, large: bool) -> Path:
    """A published model's folder."""
    import marian_models  # these are of tests/helpers
    import published_text
    import torch_archives

    kind, _, form = family.partition("-")
    if form in ("npz", "bin"):
        few = marian_models.vocabulary(64)
        marian_models.vocabulary = lambda size: vocabulary(few, size)
        d, ff, layers, size = (768, 3072, 3, 32000) if large else (16, 32, 1, 80)
        options = {**marian_models.STUDENT, "dim-emb": d, "enc-depth": layers, "dec-depth": layers}
        options |= {"transformer-heads": 8, "transformer-dim-ffn": ff, "dim-vocabs": [size, size]}
        return marian_models.write_model(folder, options, integers=form == "bin")
    published_text.write_model(folder, configs(large)[kind])
    single = folder / "model.safetensors"
    tensors = read_tensors(single) if form else {}
    if form == "torch":
        torch_archives.save(folder / "pytorch_model.bin", tensors)
    if form == "float16":
        write_tensors(single, {name: x.astype(np.float16) for name, x in tensors.items()}, metadata={"format": "pt"})
    if form == "shards":
        names = {f"model-{i}.safetensors": sorted(tensors)[i::3] for i in range(3)}
        for file, listed in names.items():
            write_tensors(folder / file, {name: tensors[name] for name in listed}, metadata={"format": "pt"})
        places = {name: file for file, listed in names.items() for name in listed}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    if form in ("torch", "shards"):
        single.unlink()
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    usual = "marian marian-shards marian-torch marian-float16 t5 nllb rows marian-npz marian-bin".split()
    parser.add_argument("--families", nargs="+", default=usual)
    parser.add_argument("--exports", nargs="+", default=EXPORTS)
    chosen = parser.parse_args()
    print("| model | step | MB of weights | x the weights |\n|-|-|-|-|")
    most = 0.0
    for family in chosen.families:
        steps = ["import of Marian's" if family.endswith(("npz", "bin")) else "import"]
        if family in (*configs(False), "marian-bin"):
            steps += [*chosen.exports, "to-huggingface" if family in configs(False) else "to-marian"]
        with tempfile.TemporaryDirectory() as temporary:
            base = Path(temporary)
            peaks = [measured(base / str(large), family, large, steps) for large in (False, True)]
            config = TransformerConfig.from_dict(json.loads((base / "True" / "ours" / "config.json").read_text()))
        weights = 4 * parameter_count(config)
        for step, tiny, large in zip(steps, *peaks, strict=True):
            most = max(most, times := (large - tiny) / weights)
            print(f"| {family} | {step} | {weights / 1e6:.0f} | {times:.2f} |", flush=True)
    return 0 if most <= LIMIT else 1


def measured(folder: Path, family: str, large: bool, steps: list[str]) -> list[int]:
    """The peak of each step's process, the first of which makes the checkpoint of the others."""
    theirs, ours = written(folder / "theirs", family, large), folder / "ours"
    first, *others = steps
    found = [peak(first, theirs, ours)]
    for step in others:
        kind, _, rest = step.rpartition(" ")
        more = rest.split(":") if ":" in rest else []
        found.append(peak((kind or "export") if more else step, ours, folder / f"out-{len(found)}", *more))
    return found


def peak(*arguments: object) -> int:
    command = [sys.executable, "-W", "ignore", "-c", STEP, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{arguments}: {last_line(done.stderr)}")
    return int(done.stdout.split()[-1])


if __name__ == "__main__":
    raise SystemExit(main())
