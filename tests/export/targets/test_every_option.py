"""Every option of the config in every target, against the reference, as it is exported without being asked for more.

Targets with graphs of their own have files of their own, where pairs of options or lengths are varied too: portable
(`test_all_configs.py`, beside MLX) and cpu (`test_cpu_validate.py`); the one file with the search inside is in
`search/test_validate.py`.
"""

from pathlib import Path

import pytest
from combined import combined
from random_models import write_model
from small_models import CHOICES, encoder_decoder

from export.targets.table import TARGETS
from export.validate import compare

ELSEWHERE = {"portable", "cpu"}


@pytest.mark.fast("causal=True-web")
@pytest.mark.parametrize(
    ("name", "target"), combined(CHOICES, [name for name in TARGETS if name not in ELSEWHERE], step=8)
)
def test_every_option(name: str, target: str, tmp_path: Path) -> None:
    models = write_model(encoder_decoder(name), tmp_path, 3, target=target)
    report = compare(*models, ["onnxruntime"], threads=1, searches=False)
    assert report.equal, (report.seed, report.failures())
