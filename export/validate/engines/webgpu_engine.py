"""ONNX Runtime's WebGPU provider as an engine, run by headless Chromium: the exported files as a browser runs them.

Needs a browser made of Chromium (`browser.find_browser`) and the npm package onnxruntime-web (web_host.py). Without
a GPU Chromium computes WebGPU on the processor, by SwiftShader; the report names the adapter.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import onnx

from export.web.assets import WEBGPU, version_of
from mlx_transformer.core.checkpoint import Checkpoint
from mlx_transformer.system.errors import UserError

from .browser import Browser
from .protocol import Node, Placement, Unavailable
from .wasm_engine import WasmEngine, WasmSession
from .web_host import find_package

PROVIDER = "WebGpuExecutionProvider"
ADAPTERS = ("software",)
PLACE = re.compile(r"(?:Node\(s\)|All nodes) placed on \[(\w+)\]")
NODE = re.compile(r"\] +(\w+) \((.*)\)")


class WebGpuEngine(WasmEngine):
    name = "webgpu"
    device = "webgpu"

    def __init__(self, checkpoint: Checkpoint, onnx_folder: Path, adapter: str = "", threads: int | None = None):
        """adapter: "software" computes on the processor, though there be a GPU."""
        if adapter not in ("", *ADAPTERS):
            raise UserError(f"webgpu: adapter {adapter!r} is not one of {', '.join(ADAPTERS)}")
        self.requested = adapter
        super().__init__(checkpoint, onnx_folder, threads)

    def open(self, path: Path, model: onnx.ModelProto | None = None) -> WasmSession:
        if self.precision == "float16" and not self.host.versions["adapter"]["float16"]:
            raise Unavailable(f"{self.name}: its adapter ({self.adapter}) doesn't compute in float16")
        return super().open(path, model)

    def start(self) -> Browser:
        return Browser(find_package("webgpu", *WEBGPU), self.threads, self.requested)

    @property
    def adapter(self) -> str:
        """Who made it and what it is called, as far as the browser tells."""
        adapter = self.host.versions["adapter"]
        names = [adapter[key] for key in ("vendor", "architecture", "device", "description") if adapter[key]]
        return " ".join(dict.fromkeys(names)) + (", on the processor" if adapter["software"] else "")

    def details(self) -> dict[str, str]:
        browser = re.search(r"Chrome/([\d.]+)", self.host.versions["browser"])
        return {
            "onnxruntime-web": version_of(self.host.exchange.package),
            "browser": f"Chromium {browser[1]}" if browser else self.host.versions["browser"],
            "adapter": self.adapter,
        }

    def placement(self) -> Placement:
        """Say where it ran, by ONNX Runtime's own account of the files as they are used."""
        sessions: dict[str, Any] = self.sessions
        nodes = tuple(node for name, session in sessions.items() for node in placed(name, session.opened["placed"]))
        if not any(node.provider == PROVIDER for node in nodes):
            raise Unavailable(f"{self.name}: no node ran on {PROVIDER}")
        return Placement(self.name, PROVIDER, "none", str(self.threads), self.details(), nodes)


def placed(graph: str, lines: Iterable[str]) -> Iterator[Node]:
    """Yield the nodes that ONNX Runtime's log names."""
    provider = ""
    for line in lines:
        if match := PLACE.search(line):
            provider = match[1]
        elif match := NODE.search(line):
            yield Node(graph, match[2], match[1], provider)
