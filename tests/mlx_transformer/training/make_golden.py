"""What PyTorch computes of the same numbers: writes golden_torch.npz beside this file.

Needs PyTorch, which the tests don't:
    PYTHONPATH=tests/helpers PEERS/bin/python tests/mlx_transformer/training/make_golden.py
"""

from pathlib import Path

import numpy as np
import torch  # type: ignore[import-not-found]
from golden_numbers import ADAPTER_ALPHA, RATES, numbers
from torch.nn import functional

SMOOTHING, PAD = 0.1, 0


def optimized(kind: type, **options: object) -> np.ndarray:
    """(steps, 6, 4): the matrix after each step, its gradients being numbers(100 + step)."""
    weight = torch.nn.Parameter(torch.tensor(numbers(1, 6, 4)))
    optimizer = kind([weight], lr=1.0, **options)
    after = []
    for step, rate in enumerate(RATES):
        optimizer.param_groups[0]["lr"] = rate
        weight.grad = torch.tensor(numbers(100 + step, 6, 4))
        optimizer.step()
        after.append(weight.detach().numpy().copy())
    return np.array(after)


def losses() -> dict[str, np.ndarray]:
    """Label-smoothed cross entropy of hidden states times a matrix, summed over what is no padding; gradients."""
    found = {}
    for name, smoothing in (("smoothed", SMOOTHING), ("plain", 0.0)):
        h, w, b = (
            torch.tensor(numbers(seed, *shape), requires_grad=True)
            for seed, shape in ((2, (3, 7, 8)), (3, (19, 8)), (4, (19,)))
        )
        y = torch.tensor(np.random.default_rng(5).integers(0, 19, (3, 7)))
        y[1, 3:] = PAD
        logits = (h @ w.T + b).reshape(-1, 19)
        loss = functional.cross_entropy(
            logits, y.reshape(-1), ignore_index=PAD, reduction="sum", label_smoothing=smoothing
        )
        loss.backward()
        found |= {f"{name}.loss": loss.detach().numpy(), "targets": y.numpy()}
        found |= {f"{name}.{part}": value.grad.numpy() for part, value in (("h", h), ("w", w), ("b", b))}
    return found


def clipped() -> dict[str, np.ndarray]:
    """Two gradients scaled together to a norm of 0.7."""
    values = [torch.nn.Parameter(torch.zeros(6, 4)), torch.nn.Parameter(torch.zeros(4))]
    for seed, value in enumerate(values, start=6):
        value.grad = torch.tensor(numbers(seed, *value.shape))
    norm = torch.nn.utils.clip_grad_norm_(values, 0.7)
    return {"clip.norm": norm.numpy(), "clip.matrix": values[0].grad.numpy(), "clip.vector": values[1].grad.numpy()}


def adapted() -> dict[str, np.ndarray]:
    """Outputs and gradients of a linear map (6, 8) with an adapter of rank 3, from (2, 5, 8); of DoRA with the norm
    left out of the gradient."""
    found = {}
    for kind in ("lora", "dora"):
        w, b, g = (torch.tensor(numbers(seed, *shape)) for seed, shape in ((11, (6, 8)), (12, (6,)), (13, (2, 5, 6))))
        inputs = {"x": (14, (2, 5, 8)), "lora_a": (15, (3, 8)), "lora_b": (16, (6, 3)), "magnitude": (17, (6,))}
        leaves = {name: torch.tensor(numbers(s, *shape), requires_grad=True) for name, (s, shape) in inputs.items()}
        x, lora_a, lora_b, magnitude = leaves.values()
        weight = w + ADAPTER_ALPHA / 3 * lora_b @ lora_a
        if kind == "dora":
            weight = (magnitude / torch.linalg.vector_norm(weight, dim=1).detach())[:, None] * weight
        y = functional.linear(x, weight, b)
        (y * g).sum().backward()
        found[f"{kind}.y"] = y.detach().numpy()
        found |= {f"{kind}.{name}": leaf.grad.numpy() for name, leaf in leaves.items() if leaf.grad is not None}
    return found


if __name__ == "__main__":
    betas = {"betas": (0.9, 0.98), "eps": 1e-9}
    np.savez(
        Path(__file__).with_name("golden_torch.npz"),
        adam=optimized(torch.optim.Adam, **betas),
        adamw=optimized(torch.optim.AdamW, weight_decay=0.3, **betas),
        **losses(),
        **clipped(),
        **adapted(),
    )
    print(f"golden_torch.npz: PyTorch {torch.__version__}")
