"""Serve a model on many machines, with Ray Serve: MODEL=runs/mine-onnx serve run ray_serve:app

POST {"text": "..."} to port 8000. Requests that wait are translated together; a replica that dies is started again, and
the others answer meanwhile.
"""

import os
from typing import Any

from ray import serve
from starlette.requests import Request

import mlx_transformer as mt


@serve.deployment(num_replicas=2, ray_actor_options={"num_cpus": 1}, health_check_period_s=1)
class Translator:
    def __init__(self, model: str):
        self.model = mt.open_model(model, threads=1)

    @serve.batch(max_batch_size=32, batch_wait_timeout_s=0.002)
    async def translate(self, lines: list[str]) -> list[str]:
        return self.model.translate(lines, beam=4)

    async def __call__(self, request: Request) -> dict[str, Any]:
        text = (await request.json())["text"]
        return {"translation": await self.translate(text), "worker": os.getpid()}


app = Translator.bind(os.environ.get("MODEL", "runs/mine-onnx"))
