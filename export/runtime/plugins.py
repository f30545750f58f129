"""Execution providers that come as packages of their own, for any ONNX Runtime: its WebGPU and MLX on a Mac."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import onnxruntime as ort

from mlx_transformer.system.errors import UserError

PLUGINS = {"WebGpuExecutionProvider": "onnxruntime_ep_webgpu", "MLXExecutionProvider": "onnxruntime_ep_mlx"}
"""{provider: the module that knows its library}"""

_registered: set[str] = set()
_alone = threading.Lock()


def find_plugin(provider: str) -> None:
    """Let ONNX Runtime have a provider by this name, if it is a plugin whose package is installed and is not there yet.

    A library is loaded once a process, and gives a provider where it finds a device. `UserError` for one that can't be
    loaded.
    """
    if provider not in PLUGINS or provider in ort.get_available_providers():
        return
    with _alone:
        if provider in _registered:
            return
        try:
            library = import_module(PLUGINS[provider]).get_library_path()
        except ModuleNotFoundError:
            return
        try:
            ort.register_execution_provider_library(provider, library)
        except Exception as error:  # onnxruntime's exceptions have no common base of their own; or it has no plugins
            reason = " ".join(str(error).split())[:300]
            raise UserError(f"{PLUGINS[provider]}: onnxruntime {ort.__version__} can't load it ({reason})") from error
        _registered.add(provider)


def chosen(options: ort.SessionOptions, providers: Sequence[Any]) -> Sequence[Any] | None:
    """Give a session's options the plugin among its providers, on its GPU if it has one, with the CPU for what it
    can't do; returns what is left to name, None where there was one. `UserError` for a plugin beside others."""
    pairs = [(each, {}) if isinstance(each, str) else each for each in providers]
    plugins = [(name, values) for name, values in pairs if name in _registered]
    if not plugins:
        return providers
    if others := [name for name, _ in pairs if name not in ("CPUExecutionProvider", plugins[0][0])]:
        raise UserError(f"provider {plugins[0][0]} works beside the CPU alone, not beside {', '.join(others)}")
    name, values = plugins[0]
    devices = [device for device in ort.get_ep_devices() if device.ep_name == name]
    devices.sort(key=lambda candidate: candidate.device.type != ort.OrtHardwareDeviceType.GPU)
    options.add_provider_for_devices(devices[:1], {key: str(value) for key, value in values.items()})
    return None


def missing(provider: str) -> str:
    """Say why a provider isn't available, where it is a plugin; "" of others."""
    if provider not in PLUGINS:
        return ""
    package = PLUGINS[provider].replace("_", "-")
    return f"; {package} finds no device" if provider in _registered else f"; it comes by pip install {package}"
