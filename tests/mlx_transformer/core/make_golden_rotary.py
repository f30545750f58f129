"""Write golden_rotary.json: rotary frequencies as transformers computes them, each kind at two widths.

Run it where transformers 5.24 and torch are installed: python make_golden_rotary.py
"""

import json
from pathlib import Path

from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


def factors(pairs: int, step: float) -> list[float]:
    return [round(1 + step * i, 3) for i in range(pairs)]


KINDS = {
    "linear": {"factor": 8.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": {"factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0},
    "yarn, not truncated": {"factor": 40.0, "beta_fast": 20.0, "beta_slow": 0.7, "truncate": False},
    "longrope": {"factor": 32.0},
}
OURS = {"low_freq_factor": "low", "high_freq_factor": "high", "short_factor": "short", "long_factor": "long"}
OURS |= {"original_max_position_embeddings": "length", "rope_type": "kind"}


def golden(name: str, width: int, base: float) -> dict:
    kind = name.partition(",")[0]
    theirs = {"rope_type": kind, "original_max_position_embeddings": 2048, **KINDS[name]}
    if kind == "longrope":
        theirs |= {"short_factor": factors(width // 2, 0.05), "long_factor": factors(width // 2, 0.7)}
    config = LlamaConfig(
        hidden_size=2 * width, num_attention_heads=1, max_position_embeddings=int(2048 * theirs["factor"]),
        rope_parameters={"rope_theta": base, "partial_rotary_factor": 0.5, **theirs},
    )  # fmt: skip
    frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config, "cpu")
    long, _ = ROPE_INIT_FUNCTIONS[kind](config, "cpu", seq_len=2049)
    scaling = {OURS.get(key, key): value for key, value in theirs.items()}
    if kind in ("yarn", "longrope"):
        scaling |= {"attention_factor": factor}
    scaling |= {"truncate": theirs.get("truncate", True)} if kind == "yarn" else {}
    for key in {"linear": ("length",), "longrope": ("factor",)}.get(kind, ()):
        del scaling[key]
    numbers = {"frequencies": frequencies.tolist(), "long": long.tolist()}
    return {"width": width, "base": base, "scaling": scaling, **numbers}


if __name__ == "__main__":
    rows = [golden(name, *size) for name in KINDS for size in ((16, 10000.0), (48, 500000.0))]
    lines = ",\n".join(map(json.dumps, rows))
    Path(__file__).with_name("golden_rotary.json").write_text(f"[\n{lines}\n]\n")
