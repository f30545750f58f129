"""Serve a model on many machines, with Ray Serve: MODEL=runs/mine-onnx serve run ray_serve:app

POST {"text": "..."} to port 8000: a translator translates the text, a decoder continues it. A decoder with a chat
template also answers {"messages": [{"role": "user", "content": "..."}]}. Texts that wait are read together; a replica
that dies is started again, and the others answer meanwhile.
"""

import asyncio
import os
from typing import Any

from ray import serve
from starlette.requests import Request

import mlx_transformer as mt


@serve.deployment(num_replicas=2, ray_actor_options={"num_cpus": 1}, health_check_period_s=1)
class Answers:
    def __init__(self, model: str):
        self.model = mt.open_model(model, threads=1)

    @serve.batch(max_batch_size=32, batch_wait_timeout_s=0.002)
    async def of_texts(self, texts: list[str]) -> list[str]:
        if self.model.config.has_encoder:
            return self.model.translate(texts, beam=4)
        return self.model.complete(texts, max_new_tokens=128)

    async def __call__(self, request: Request) -> dict[str, Any]:
        asked = await request.json()
        if "messages" in asked:
            answer = await asyncio.to_thread(self.model.chat, asked["messages"])
        else:
            answer = await self.of_texts(asked["text"])
        return {"answer": answer, "worker": os.getpid()}


app = Answers.bind(os.environ.get("MODEL", "runs/mine-onnx"))
