"""Opens sessions of ONNX Runtime: threads and their spinning, passes of the optimiser, providers, weights in memory.

Some execution providers are plugins, packages beside ONNX Runtime: WebGPU, and MLX on a Mac.
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

from export.interface import (
    DECODER_CPU,
    DECODER_FIRST,
    DECODER_NEXT,
    ENCODER,
    ENCODER_CPU,
    LISTED_CPU,
    MODEL,
    PROMPT_CPU,
    ROWS_CPU,
    STEP_CPU,
)
from export.precision.table import ACTIVATIONS
from mlx_transformer.decoding.steps import Stopped
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.fields import Bounds, check_value
from mlx_transformer.system.machine import free_cores, side_by_side, usable_cores

from .folder import OnnxFolder
from .unpacking import unpack

PLUGINS = {"WebGpuExecutionProvider": "onnxruntime_ep_webgpu", "MLXExecutionProvider": "onnxruntime_ep_mlx"}
"""{provider: the plugin's module, which knows the path of its library}"""

_registered: set[str] = set()
_alone = threading.Lock()


def find_plugin(provider: str) -> None:
    """Register the provider with ONNX Runtime if it is a plugin, its package is installed and it isn't available yet.

    A process loads a library once; the provider is available if the library finds a device. Raises `UserError` if the
    library can't be loaded.
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
        except Exception as error:  # onnxruntime's exceptions have no common base; an old version has no plugins
            reason = " ".join(str(error).split())[:300]
            raise UserError(f"{PLUGINS[provider]}: onnxruntime {ort.__version__} can't load it ({reason})") from error
        _registered.add(provider)


def chosen(options: ort.SessionOptions, providers: Sequence[Any]) -> Sequence[Any] | None:
    """Add the plugin among these providers to the session's options, on a GPU if there is one.

    The CPU computes the operators that the plugin lacks. Returns the providers to pass to the session: all of them
    without a plugin, None with one. Raises `UserError` for a plugin together with providers other than the CPU.
    """
    pairs = [(each, {}) if isinstance(each, str) else each for each in providers]
    plugins = [(name, values) for name, values in pairs if name in _registered]
    if not plugins:
        return providers
    if others := [name for name, _ in pairs if name not in ("CPUExecutionProvider", plugins[0][0])]:
        raise UserError(f"provider {plugins[0][0]} works only with the CPU, not with {', '.join(others)}")
    name, values = plugins[0]
    devices = [device for device in ort.get_ep_devices() if device.ep_name == name]
    devices.sort(key=lambda candidate: candidate.device.type != ort.OrtHardwareDeviceType.GPU)
    options.add_provider_for_devices(devices[:1], {key: str(value) for key, value in values.items()})
    return None


def missing(provider: str) -> str:
    """Why a plugin isn't available, for the end of a message; "" for other providers."""
    if provider not in PLUGINS:
        return ""
    package = PLUGINS[provider].replace("_", "-")
    return f"; {package} finds no device" if provider in _registered else f"; it comes by pip install {package}"


CPU = "CPUExecutionProvider"

SLOW_FUSIONS = ["SkipLayerNormFusion", "BiasGeluFusion"]
"""Passes of ONNX Runtime's optimiser to leave out. On CPU their fused operators are slower than the pairs they replace:
Add and LayerNormalization, Add and Gelu (which has its own kernel for AVX-512)."""

FOLDING = ["ConstantFolding"]
"""A pass of ONNX Runtime's optimiser to leave out if a graph transposes its matrices. It would copy each transposed
matrix before packing it. Without the pass the product absorbs the Transpose and packs the stored matrix, which halves
the time of loading."""

TRANSPOSING = (ENCODER, DECODER_FIRST, DECODER_NEXT, MODEL)
"""Graphs of this project that transpose their matrices, in standard operators."""

SPIN_MICROSECONDS = 500
"""How long idle threads spin after a run. The search between two decoding steps takes less, and so does the time
between two calls with one text each. Threads that spin until the next run save a tenth of a small model's time."""

WITHIN_MICROSECONDS = 1000
"""How long idle threads spin between the operators of a run, and while a session opens, if they rest right after a run.
By ONNX Runtime's default, and always before 1.26, they spin all the time, and opening takes twice the CPU time."""

MOST_THREADS = max(16, 4 * usable_cores())
"""Most threads of an operator. More threads than cores are slower, and far more are very slow: 300 threads on two cores
took forty times as long."""

POLL_SECONDS = 0.05
"""Seconds between two checks whether a run should stop."""

SMALL = 24e6
"""Most bytes of weights of a small model, for which several batches at a time, with a thread each, are faster than a
batch at a time with several threads."""


def session_options(
    threads: int | None = None, patience: int = 0, activations: str | None = None, may_overflow: bool = False
) -> ort.SessionOptions:
    """The options of a session.

    threads: of an operator; None lets ONNX Runtime use all cores. patience: microseconds that idle threads spin after a
    run. activations: "int8" or "float32", for weights in blocks that ONNX Runtime fuses from standard operators to its
    own (`precision.table.ACTIVATIONS`). may_overflow: `Int8Scales.may_overflow` of the weights.
    Raises `UserError` if `threads` is below 1 or above `MOST_THREADS`.
    """
    options = ort.SessionOptions()
    if threads is not None:
        check_value("threads", threads, Annotated[int, Bounds(at_least=1, at_most=MOST_THREADS)])
        options.intra_op_num_threads = threads
    # A model's sessions run in turn. By default the threads of the resting session keep spinning on the cores, and
    # greedy decoding of one sentence takes up to twice as long.
    options.add_session_config_entry("session.intra_op.spin_duration_us", str(patience or WITHIN_MICROSECONDS))
    if not patience:
        options.add_session_config_entry("session.force_spinning_stop", "1")
    if activations is not None:
        options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", str(ACTIVATIONS[activations]))
    if may_overflow:
        # For processors that saturate a sum of two products at 16 bits: makes weights outside of branches and loops
        # unsigned, whose kernel sums in 32 bits. It takes 1.1 to 1.2 times as long, for a single row 1.2 to 1.7 times.
        options.add_session_config_entry("session.x64quantprecision", "1")
    options.log_severity_level = 4  # errors are raised; don't print them too
    return options


VERSION = tuple(map(int, ort.__version__.split(".")[:2]))

SHARES_FILES = VERSION >= (1, 31)
"""Whether this ONNX Runtime uses a data file in memory in place. Earlier versions may copy it."""


class _Here(threading.local):
    """How this thread's runs are computed; see `run_aside`."""

    aside = False


_here = _Here()


def run_aside() -> None:
    """Run this thread's sessions with run_async, so that they share the session's threads with runs of other threads.

    The thread waits for its run. Together they keep no more cores busy than the session has threads.
    """
    _here.aside = True


class Session(ort.InferenceSession):
    """A session whose failed runs raise a `UserError` with the file's name, e.g. for a damaged graph."""

    weights: Any = None
    """Memory that the session reads in place, e.g. the data file: kept as long as the session."""

    def __init__(self, file: str | Path, *arguments: Any, model: bytes | None = None, **options: Any):
        """model: a graph to load instead of the file's."""
        super().__init__(model or str(file), *arguments, **options)
        self.file = file

    def run(self, *arguments: Any, **options: Any) -> Any:
        try:
            return self._run_aside(*arguments, **options) if _here.aside else super().run(*arguments, **options)
        except Exception as error:  # onnxruntime's exceptions have no common base
            raise self._failed(error) from error

    def _run_aside(self, names: Sequence[str] | None, feeds: dict[str, Any], *options: Any) -> Any:
        def keep(*outputs_and_error: Any) -> None:
            result.extend(outputs_and_error)

        # The run is over when the session's thread has released `keep`, not when it calls it. If the session is closed
        # while its thread is still in Python, it waits for the thread, and the thread waits for Python's lock.
        over = SimpleQueue[Any]()
        result: list[Any] = [weakref.ref(keep, over.put)]
        try:
            self.run_async(names, feeds, keep, None, *options)
        except Exception:  # the session has only the caller's thread, e.g. on a machine with one core
            return super().run(names, feeds, *options)
        del keep
        over.get()
        _, outputs, _, error = result
        if error:
            raise RuntimeError(error)
        return outputs

    def run_until(self, stopped: Callable[[], bool], names: Sequence[str], feeds: dict[str, Any]) -> list[Any]:
        """Like `run`, but raises `Stopped` once `stopped()` is true, even in the middle of a graph or a loop in it."""
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
    model: bytes | None = None,
) -> Session:
    """Open a session on the file. Raises `UserError` if the file can't be loaded or a provider isn't available.

    providers: default CPU. without: more passes of the optimiser to leave out. model: a graph to load instead of the
    file's.
    """
    check_providers(providers)
    options = options or session_options()
    named = chosen(options, providers or [CPU])
    try:
        passes = [*SLOW_FUSIONS, *without]
        return Session(file, options, providers=named, disabled_optimizers=passes, model=model)
    except Exception as error:  # onnxruntime's exceptions have no common base
        raise UserError(f"{file}: ONNX Runtime can't load it ({' '.join(str(error).split())[:300]})") from error


def check_providers(providers: Sequence[Any] | None) -> list[str]:
    """The providers' names without their options. Raises `UserError` if a provider isn't available."""
    names = [provider if isinstance(provider, str) else provider[0] for provider in providers or [CPU]]
    for name in names:
        find_plugin(name)
    for name in names:
        if not is_available(name):
            there = ", ".join(ort.get_available_providers())
            raise UserError(f"provider {name} is not in this onnxruntime; it has {there}{missing(name)}")
    return names


def is_available(provider: str) -> bool:
    """Whether this ONNX Runtime has the provider; the provider's libraries may still fail to load."""
    return provider in ort.get_available_providers()


class Opener:
    """Opens the graphs of a folder, as often as needed, with any number of threads per operator."""

    def __init__(self, folder: OnnxFolder, providers: Sequence[Any] | None = None, verify: bool = True):
        """verify: compare the files with the folder's manifest."""
        self.folder, self.providers, self.verify = folder, providers, verify
        self.on_cpu = check_providers(providers) == [CPU]

    def listed(self, threads: int | None) -> tuple[ort.InferenceSession, ort.InferenceSession] | None:
        """The sessions for a search among given ids, (classifier's rows, decoder); None if the folder lacks them."""
        if len(self.folder.listed) < 2:
            return None
        rows, decoder = (self._open(name, threads, self.weights) for name in (ROWS_CPU, LISTED_CPU))
        return rows, decoder

    def __call__(self, threads: int | None) -> dict[str, ort.InferenceSession]:
        """Open all graphs: {graph: session}. Raises `UserError` if a file is damaged or can't be loaded."""
        if self.verify:
            self.folder.verify_graphs()
        # A decoder's operators take 10 to 40 us, less than waking a thread. On two free cores, threads that spin in
        # between make steps 1.5 times as fast. On busy cores they take time from the threads that they wait for: steps
        # take 1.7 times as long.
        spins = threads != 1 and STEP_CPU in self.folder.graphs and free_cores() >= (threads or usable_cores())
        # All graphs are opened at the same time: opening a graph takes one core and releases Python's lock. So does
        # reading the data for its digest, which runs beside it.
        graphs, weights = self.folder.graphs, self.weights
        each = [partial(self._open, name, threads, weights, spins) for name in graphs]
        work: list[Callable[[], Any]] = [partial(side_by_side, each, threads or usable_cores())]
        if self.verify:
            work.insert(0, self.folder.verify_data)  # its error comes first: it says more than a session's about damage
        *_, opened = side_by_side(work, len(work))
        sessions = dict(zip(graphs, opened, strict=True))
        if weights is not None and hasattr(mmap, "MADV_DONTNEED"):
            weights.madvise(mmap.MADV_DONTNEED)  # most pages were needed only for packing; the rest are read again
        return sessions

    def _open(
        self, name: str, threads: int | None, weights: mmap.mmap | None, spins: bool = False
    ) -> ort.InferenceSession:
        in_turn = len(self.folder.graphs) > 1 and name not in (ENCODER_CPU, DECODER_CPU, LISTED_CPU)
        patience = 0 if in_turn else SPIN_MICROSECONDS
        options = session_options(threads, patience, self.folder.activations, self.folder.may_overflow)
        if name in (STEP_CPU, PROMPT_CPU) and threads != 1 and not spins:  # with a single thread, none can spin
            options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        file = {**self.folder.graphs, **self.folder.listed}[name]
        data, files = self.folder.weights, {}
        model = unpack(file, self.folder.integers, files) if self.on_cpu and self.folder.integers else None
        if data is not None and (weights is not None or files):
            files[data.name] = _in_memory(data) if weights is None else weights
            sizes = [*map(len, files.values())]
            options.add_external_initializers_from_files_in_memory([*files], [*files.values()], sizes)
        if weights is not None:  # in place of the file
            options.add_session_config_entry("session.use_external_initializer_file_buffers_directly", "1")
        floats = self.folder.has_float32_matrices or (model is not None and self.folder.precision == "float32")
        without = FOLDING if self.on_cpu and name in TRANSPOSING and floats else ()
        session = open_session(file, self.providers, options, without, model)
        session.weights = None if weights is None else files
        return session

    @cached_property
    def weights(self) -> mmap.mmap | None:
        """The data file in memory, shared by all sessions of a small model; None for other models.

        A small model has two sets of sessions, which would map the same tables four times. A large model has one set.
        It needs less memory if ONNX Runtime itself maps each matrix only until it is packed.
        """
        file = self.folder.weights
        if file is None or not self.on_cpu or not SHARES_FILES or not 0 < self.folder.weights_size <= SMALL:
            return None
        return _in_memory(file)


def _in_memory(file: Path) -> mmap.mmap:
    with file.open("rb") as opened:
        return mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
