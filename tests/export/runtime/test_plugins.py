"""Providers that come as packages, played by modules: found when asked for, once, and told where they are not."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import onnxruntime as ort
import pytest

from export.runtime import sessions as plugins
from export.runtime.sessions import check_providers
from export.validate.engines.onnxruntime_engine import provider_of
from export.validate.engines.protocol import Unavailable
from mlx_transformer.system.errors import UserError

WEBGPU, CPU = "WebGpuExecutionProvider", "CPUExecutionProvider"
GPU_DEVICE, CPU_DEVICE = (
    SimpleNamespace(ep_name=WEBGPU, device=SimpleNamespace(type=kind))
    for kind in (ort.OrtHardwareDeviceType.GPU, ort.OrtHardwareDeviceType.CPU)
)


@pytest.fixture
def runtime(monkeypatch):
    """An ONNX Runtime whose registered libraries give providers, where `devices` has some for them."""
    played = SimpleNamespace(registered=[], devices=[CPU_DEVICE, GPU_DEVICE])

    def register(name, library):
        if "damaged" in library:
            raise RuntimeError("invalid ELF\nheader")
        played.registered.append((name, library))

    def available():
        found = {device.ep_name for device in played.devices} & {name for name, _ in played.registered}
        return [CPU, *found]

    monkeypatch.setattr(plugins, "_registered", set())
    monkeypatch.setattr(ort, "register_execution_provider_library", register)
    monkeypatch.setattr(ort, "get_available_providers", available)
    monkeypatch.setattr(ort, "get_ep_devices", lambda: played.devices)
    return played


@pytest.fixture
def install(monkeypatch):
    def install(module, library):
        package = ModuleType(module)
        package.get_library_path = lambda: library
        monkeypatch.setitem(sys.modules, module, package)

    for module in plugins.PLUGINS.values():
        monkeypatch.setitem(sys.modules, module, None)
    return install


@pytest.mark.parametrize(("device", "provider"), [("webgpu", WEBGPU), ("mlx", "MLXExecutionProvider")])
def test_a_package_that_is_installed_is_a_runtime(device, provider, runtime, install):
    runtime.devices = [SimpleNamespace(ep_name=provider, device=GPU_DEVICE.device)]
    package = plugins.PLUGINS[provider].replace("_", "-")
    with pytest.raises(UserError, match=rf"{provider} is not in this .*; it comes by pip install {package}$"):
        check_providers([provider])
    with pytest.raises(Unavailable, match=rf"onnxruntime:{device}: .*; it comes by pip install {package}"):
        provider_of(device)
    install(plugins.PLUGINS[provider], "lib.so")
    assert check_providers([(provider, {"a": 1}), CPU]) == [provider, CPU]
    assert provider_of(device) == provider
    assert runtime.registered == [(provider, "lib.so")]


def test_a_machine_without_a_device_and_a_library_that_is_none_are_told(runtime, install):
    install("onnxruntime_ep_webgpu", "damaged.so")
    with pytest.raises(UserError, match=r"onnxruntime_ep_webgpu: onnxruntime .* can't load it \(invalid ELF header\)"):
        check_providers([WEBGPU])
    install("onnxruntime_ep_webgpu", "lib.so")
    runtime.devices = []
    for _ in range(2):
        with pytest.raises(UserError, match=r"; onnxruntime-ep-webgpu finds no device$"):
            check_providers([WEBGPU])
    assert len(runtime.registered) == 1
    with pytest.raises(UserError, match=r"provider NoProvider is not in this .*; it has CPUExecutionProvider$"):
        check_providers(["NoProvider"])


def test_a_session_takes_the_gpu_and_leaves_the_rest_to_the_cpu(runtime, install):
    install("onnxruntime_ep_webgpu", "lib.so")
    check_providers([WEBGPU])
    taken = []
    options = SimpleNamespace(add_provider_for_devices=lambda *given: taken.append(given))
    assert plugins.chosen(options, [CPU]) == [CPU]
    assert taken == []
    assert plugins.chosen(options, [(WEBGPU, {"size": 3}), CPU]) is None
    assert taken == [([GPU_DEVICE], {"size": "3"})]
    with pytest.raises(UserError, match=f"{WEBGPU} works only with the CPU, not with CUDAExecutionProvider"):
        plugins.chosen(options, [WEBGPU, "CUDAExecutionProvider"])
