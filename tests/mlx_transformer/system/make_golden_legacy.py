"""A file of the form before version 1.6, by PyTorch itself: writes golden_legacy.bin beside this file.

Needs PyTorch, which the tests don't; made by version 2.13.0:
    PEERS/bin/python tests/mlx_transformer/system/make_golden_legacy.py

PyTorch names storages by their places in memory, so that the bytes of the names differ from one run to the next.
"""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

import torch  # type: ignore[import-not-found]

if __name__ == "__main__":
    x = torch.arange(24.0).reshape(4, 6)
    tensors = OrderedDict(
        whole=x,
        transposed=x.T,
        parameter=torch.nn.Parameter(x[1:3, ::2]),
        half=x.half(),
        bfloat16=x.bfloat16(),
        integers=x.long(),
        scalar=torch.tensor(5.0),
        empty=torch.zeros(0, 3),
    )
    path = Path(__file__).with_name("golden_legacy.bin")
    torch.save(tensors, path, _use_new_zipfile_serialization=False)
    print(f"{path.name}: PyTorch {torch.__version__}")
