"""Write golden/minilm.json: what PyTorch and transformers say in float64 of `lines.world`, and how far float32 is off.

An environment with torch, transformers and safetensors, which this project's is not:

    python tests/peers/make_minilm_golden.py FOLDER_OF_THE_MODEL

    {"embeddings": first 8 numbers of each line's vector, "neighbours": the ten lines nearest to each, nearest first,
     "gaps": cosine of the tenth less that of the eleventh, "float32": {"rms": ..., "max": ...} of its errors,
     "made_with": versions, "sha256": of the weights}
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import torch
import transformers

HERE = Path(__file__).parent
LONGEST, NEIGHBOURS, SHOWN = 256, 10, 8


def vectors(folder: Path, lines: list[str], dtype: torch.dtype) -> torch.Tensor:
    """(lines, D): each line alone, the mean of its tokens' rows at length 1."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder, attn_implementation="eager").to(dtype).eval()
    found = []
    with torch.no_grad():
        for line in lines:
            inputs = tokenizer(line, truncation=True, max_length=LONGEST, padding=False, return_tensors="pt")
            found.append(model(**inputs).last_hidden_state[0].mean(dim=0))
    return torch.nn.functional.normalize(torch.stack(found), dim=1)


def main(folder: Path) -> None:
    lines = (HERE / "lines.world").read_text(encoding="utf-8").splitlines()
    torch.set_num_threads(1)
    exact, rounded = (vectors(folder, lines, dtype) for dtype in (torch.float64, torch.float32))
    cosines = exact @ exact.T
    cosines.fill_diagonal_(-2)
    best = cosines.sort(dim=1, descending=True)
    error = rounded.double() - exact
    golden = {
        "embeddings": [[float(f"{x:.13g}") for x in row[:SHOWN].tolist()] for row in exact],
        "neighbours": best.indices[:, :NEIGHBOURS].tolist(),
        "gaps": [float(f"{x:.3g}") for x in (best.values[:, NEIGHBOURS - 1] - best.values[:, NEIGHBOURS]).tolist()],
        "float32": {"rms": float(error.square().mean().sqrt()), "max": float(error.abs().max())},
        "made_with": {"torch": torch.__version__, "transformers": transformers.__version__},
        "sha256": hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest(),
    }
    rows = {name: values for name, values in golden.items() if isinstance(values, list)}
    text = json.dumps({name: values for name, values in golden.items() if name not in rows}, indent=1)[:-2]
    for name, values in rows.items():
        text += f',\n "{name}": [\n' + ",\n".join(f"  {json.dumps(row)}" for row in values) + "\n ]"
    (HERE / "golden" / "minilm.json").write_text(text + "\n}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
