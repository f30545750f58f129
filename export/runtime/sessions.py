"""Execution providers that come as packages of their own, for any ONNX Runtime: its WebGPU and MLX on a Mac.

Sessions of ONNX Runtime as this project opens them: threads, waiting, passes of the optimiser, where weights lie.
"""

from __future__ import annotations

import mmap
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from importlib import import_module
from pathlib import Path
from queue import SimpleQueue
from typing import Annotated, Any

import onnxruntime as ort

from export.interface import DECODER_CPU, DECODER_FIRST, DECODER_NEXT, ENCODER, ENCODER_CPU, LISTED_CPU, MODEL, ROWS_CPU
from export.precision.table import ACTIVATIONS
from mlx_transformer.decoding.steps import Stopped
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.fields import Bounds, check_value
from mlx_transformer.system.machine import side_by_side, usable_cores

from .folder import OnnxFolder

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


CPU = "CPUExecutionProvider"

SLOW_FUSIONS = ["SkipLayerNormFusion", "BiasGeluFusion"]
"""Passes of ONNX Runtime's optimiser. On CPU the operator of each is slower than the two it replaces: Add and
LayerNormalization, Add and Gelu, which has a kernel for AVX-512 of its own."""

FOLDING = ["ConstantFolding"]
"""A pass of ONNX Runtime's optimiser. It copies a matrix that a graph transposes where it multiplies, and then packs
it. Without it the product takes in the Transpose and packs the matrix as it is stored: half the time of loading."""

TRANSPOSING = (ENCODER, DECODER_FIRST, DECODER_NEXT, MODEL)
"""The graphs of this project that do so, in standard operators."""

SPIN_MICROSECONDS = 500
"""Between two steps the search needs less, as do calls for one text after the other of a model with one session:
threads that wait for the next one save a tenth of a small model's time."""

WITHIN_MICROSECONDS = 1000
"""The same between the operators of a run, after which they rest at once, and while a session is opened. By ONNX
Runtime's default, and always before 1.26, they stay awake all that time, and opening takes the processor twice as
long."""

MOST_THREADS = max(16, 4 * usable_cores())
"""Most threads of one operator. More threads than cores are slower, and far more never end: 300 on two cores took forty
times as long."""

POLL_SECONDS = 0.05
"""Seconds between two looks at whether anybody still waits for a run."""

SMALL = 24e6
"""Bytes of weights below which several batches at a time, one thread each, are faster than one with several threads."""


def session_options(
    threads: int | None = None, patience: int = 0, activations: str | None = None, may_overflow: bool = False
) -> ort.SessionOptions:
    """Return the options of every session here. threads: of one operator; None lets ONNX Runtime take the machine's
    cores.

    patience: microseconds for which idle threads stay awake after a run. activations: what ONNX Runtime's own operator
    for weights in blocks, where it makes that from standard ones, multiplies them with (`precision.ACTIVATIONS`).
    may_overflow: `Int8Scales.may_overflow` says so of its weights.
    """
    options = ort.SessionOptions()
    if threads is not None:
        check_value("threads", threads, Annotated[int, Bounds(at_least=1, at_most=MOST_THREADS)])
        options.intra_op_num_threads = threads
    # A model has several sessions that run in turn: by default the resting one's threads keep the cores busy, and
    # greedy decoding of one sentence takes up to twice as long.
    options.add_session_config_entry("session.intra_op.spin_duration_us", str(patience or WITHIN_MICROSECONDS))
    if not patience:
        options.add_session_config_entry("session.force_spinning_stop", "1")
    if activations is not None:
        options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", str(ACTIVATIONS[activations]))
    if may_overflow:
        # Where the processor cuts a sum of two products to 16 bits, weights that a graph holds outside of branches and
        # loops lose their sign, and the kernel for such bytes has 32: 1.1 to 1.2 times as long, 1.2 to 1.7 for one row.
        options.add_session_config_entry("session.x64quantprecision", "1")
    options.log_severity_level = 4  # errors are raised, and told once
    return options


VERSION = tuple(map(int, ort.__version__.split(".")[:2]))

SHARES_FILES = VERSION >= (1, 31)
"""Whether this ONNX Runtime uses a data file in memory as it lies there. Earlier ones may copy it."""


class _Here(threading.local):
    """How runs that this thread asks for are computed."""

    aside = False


_here = _Here()


def run_aside() -> None:
    """From now on compute what this thread runs on a thread of the session, for which it waits: beside a run of
    another thread's, with no more cores than the session has threads."""
    _here.aside = True


class Session(ort.InferenceSession):
    """A session whose failed runs are a `UserError` that names the file: the graph isn't what it seemed to be."""

    def __init__(self, file: str | Path, *arguments: Any, weights: mmap.mmap | None = None, **options: Any):
        """weights: the data file in memory that it uses, which must live as long as the session."""
        super().__init__(str(file), *arguments, **options)
        self.file, self.weights = file, weights

    def run(self, *arguments: Any, **options: Any) -> Any:
        try:
            return self._run_aside(*arguments, **options) if _here.aside else super().run(*arguments, **options)
        except Exception as error:  # onnxruntime's exceptions have no common base of their own
            raise self._failed(error) from error

    def _run_aside(self, names: Sequence[str] | None, feeds: dict[str, Any], *options: Any) -> Any:
        def keep(*outputs_and_error: Any) -> None:
            result.extend(outputs_and_error)

        # It is over when the session's thread has let go of `keep`, not when it calls it: a session that is closed
        # while one of its threads is still in Python waits for that thread, which waits for Python's lock.
        over = SimpleQueue[Any]()
        result: list[Any] = [weakref.ref(keep, over.put)]
        try:
            self.run_async(names, feeds, keep, None, *options)
        except Exception:  # ONNX Runtime gave it no thread besides the caller's, as on a machine of one core
            return super().run(names, feeds, *options)
        del keep
        over.get()
        _, outputs, _, error = result
        if error:
            raise RuntimeError(error)
        return outputs

    def run_until(self, stopped: Callable[[], bool], names: Sequence[str], feeds: dict[str, Any]) -> list[Any]:
        """Run as `run` does, but end in the midst of a graph, a loop in it too, once `stopped()` is true: raises
        `Stopped`."""
        if stopped():
            raise Stopped
        options, over = ort.RunOptions(), threading.Event()

        def watch() -> None:
            while not over.wait(POLL_SECONDS):
                if stopped():
                    options.terminate = True
                    return

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            return list(self.run(names, feeds, options))
        except UserError:
            if stopped():
                raise Stopped from None
            raise
        finally:
            over.set()
            watcher.join()

    def run_with_iobinding(self, *arguments: Any, **options: Any) -> None:
        try:
            super().run_with_iobinding(*arguments, **options)
        except Exception as error:
            raise self._failed(error) from error

    def _failed(self, error: Exception) -> UserError:
        reason = " ".join(str(error).split())[:300]
        return UserError(f"{self.file}: ONNX Runtime can't run it ({reason}); export the model again")


def open_session(
    file: str | Path,
    providers: Sequence[Any] | None = None,
    options: ort.SessionOptions | None = None,
    without: Sequence[str] = (),
    weights: mmap.mmap | None = None,
) -> Session:
    """Raise `UserError` if the file can't be loaded or a provider isn't there. Providers: default CPU.

    without: more of the optimiser's passes to leave out. weights: as of `Session`.
    """
    check_providers(providers)
    options = options or session_options()
    named = chosen(options, providers or [CPU])
    try:
        return Session(
            file,
            options,
            providers=named,
            disabled_optimizers=[*SLOW_FUSIONS, *without],
            weights=weights,
        )
    except Exception as error:  # onnxruntime's exceptions have no common base of their own
        raise UserError(f"{file}: ONNX Runtime can't load it ({' '.join(str(error).split())[:300]})") from error


def check_providers(providers: Sequence[Any] | None) -> list[str]:
    """Return the providers' names, without options; `UserError` for one that isn't available."""
    names = [provider if isinstance(provider, str) else provider[0] for provider in providers or [CPU]]
    for name in names:
        find_plugin(name)
    for name in names:
        if not is_available(name):
            there = ", ".join(ort.get_available_providers())
            raise UserError(f"provider {name} is not in this onnxruntime; it has {there}{missing(name)}")
    return names


def is_available(provider: str) -> bool:
    """Return whether this ONNX Runtime was built with a provider; its libraries may yet fail to load."""
    return provider in ort.get_available_providers()


class Opener:
    """Opens the graphs of one folder, with any number of threads an operator, as often as is wanted."""

    def __init__(self, folder: OnnxFolder, providers: Sequence[Any] | None = None, verify: bool = True):
        """verify: hold the files against the folder's manifest."""
        self.folder, self.providers, self.verify = folder, providers, verify
        self.on_cpu = check_providers(providers) == [CPU]

    def listed(self, threads: int | None) -> tuple[ort.InferenceSession, ort.InferenceSession] | None:
        """Return the sessions of a search among given ids: the classifier's rows, and the decoder; None where they
        aren't."""
        if len(self.folder.listed) < 2:
            return None
        rows, decoder = (self._open(name, threads, self.weights) for name in (ROWS_CPU, LISTED_CPU))
        return rows, decoder

    def __call__(self, threads: int | None) -> dict[str, ort.InferenceSession]:
        """Return {graph: its session}. `UserError` says which can't be loaded, and what is damaged."""
        if self.verify:
            self.folder.verify_graphs()
        # All are opened at the same time: each takes one core and releases Python's lock meanwhile. So does reading the
        # data once more for its digest, which only the end waits for.
        graphs, weights = self.folder.graphs, self.weights
        each = [partial(self._open, name, threads, weights) for name in graphs]
        work: list[Callable[[], Any]] = [partial(side_by_side, each, threads or usable_cores())]
        if self.verify:
            work.insert(0, self.folder.verify_data)  # first: damage tells more than what a session makes of it
        *_, opened = side_by_side(work, len(work))
        sessions = dict(zip(graphs, opened, strict=True))
        if weights is not None and hasattr(mmap, "MADV_DONTNEED"):
            weights.madvise(mmap.MADV_DONTNEED)  # read for packing; what is used as it is stored comes back when it is
        return sessions

    def _open(self, name: str, threads: int | None, weights: mmap.mmap | None) -> ort.InferenceSession:
        in_turn = len(self.folder.graphs) > 1 and name not in (ENCODER_CPU, DECODER_CPU, LISTED_CPU)
        patience = 0 if in_turn else SPIN_MICROSECONDS
        options = session_options(threads, patience, self.folder.activations, self.folder.may_overflow)
        if weights is not None and (data := self.folder.weights) is not None:  # in place of the file
            options.add_session_config_entry("session.use_external_initializer_file_buffers_directly", "1")
            options.add_external_initializers_from_files_in_memory([data.name], [weights], [len(weights)])
        transposes = self.on_cpu and name in TRANSPOSING and self.folder.has_float32_matrices
        file = {**self.folder.graphs, **self.folder.listed}[name]
        return open_session(file, self.providers, options, FOLDING if transposes else (), weights)

    @cached_property
    def weights(self) -> mmap.mmap | None:
        """The data file for all sessions of a small model: two sets of them would map the same tables four times.

        A large model has one set, and is better off where ONNX Runtime maps matrix by matrix, until each is packed.
        """
        file = self.folder.weights
        if file is None or not self.on_cpu or not SHARES_FILES or not 0 < self.folder.weights_size <= SMALL:
            return None
        with file.open("rb") as opened:
            return mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
