"""Tests of what a GPU does otherwise run twice on a CPU: with its own choices and with a GPU's."""

import os

import pytest
from runtimes import mlx_gpu

DEVICE_CHOICES = ["own"] if mlx_gpu() or "MLX_TRANSFORMER_DEVICE_CHOICES" in os.environ else ["own", "gpu"]
both_choices = [pytest.mark.gpu_path, pytest.mark.usefixtures("device_choices")]
