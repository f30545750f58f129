"""What every test process needs before numpy, MLX or ONNX Runtime are imported; and a model that several files use."""

import gc
import itertools
import os
import random
import secrets
import shutil
import signal
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

# Signals are sent to what the tests start: a suite begun by nohup or as a script's background job ignores them, and
# so would its children. Windows has no SIGHUP.
for name, reaction in (("SIGINT", signal.default_int_handler), ("SIGHUP", signal.SIG_DFL), ("SIGTERM", signal.SIG_DFL)):
    if hasattr(signal, name) and signal.getsignal(getattr(signal, name)) is signal.SIG_IGN:
        signal.signal(getattr(signal, name), reaction)

# One BLAS thread a process: `make test` runs a process a core, and more threads than cores are slower than one.
# ONNX Runtime has no such variable; sessions take their thread count from SessionOptions.
for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"):
    os.environ.setdefault(variable, "1")
# MLX wakes a thread for every few operations, which interrupts the one that asks: up to half of the time of a small
# model. Linux lets batch processes finish their turn; threads and subprocesses take it over.
if hasattr(os, "SCHED_BATCH"):
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
# Whatever is written is brought to the disk before it is said to be there, thousands of times in all: a seventh of the
# suite's time was waiting for that. Linux has a folder in memory, which a container may keep small.
MEMORY, ENOUGH = Path("/dev/shm"), 6 * 2**30
if MEMORY.is_dir() and os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > ENOUGH:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))
# Help texts and tables are asserted on: no colour, and no width taken from a terminal that may not be there.
os.environ["NO_COLOR"] = "1"
os.environ["COLUMNS"] = "120"
os.environ.pop("FORCE_COLOR", None)
# Equality is judged: a GPU's products are float32's, in subprocesses too. MLX reads this when it first multiplies.
os.environ["MLX_ENABLE_TF32"] = "0"

import onnxruntime  # noqa: E402
import pytest  # noqa: E402
import runtimes  # noqa: E402
from choices import DEVICE_CHOICES, keep_fast, thin  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402
from waiting import PATIENCE  # noqa: E402

from mlx_transformer.system import progress  # noqa: E402

# No deadline: the first call of a kernel or a session may take seconds on a busy machine.
# In CI the examples are the same on every run, so that a red build can be repeated; elsewhere each run tries new ones.
settings.register_profile(
    "project",
    max_examples=30,
    deadline=None,
    print_blob=True,
    derandomize="CI" in os.environ,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("project")


# Nothing of what collecting makes is garbage: looking for it took a tenth of that time.
gc.disable()

# Minutes of few files. Begun last, one of them would keep a process busy while the others have nothing left to do.
LONG = ("mlx_transformer/training/", "repository/test_readme.py", "repository/test_notebook.py", "faults/", "fuzz/")


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(config, items):
    keep_fast(config, items)
    thin(items)
    tests = Path(__file__).parent
    items.sort(key=lambda item: not item.path.relative_to(tests).as_posix().startswith(LONG))


def pytest_collection_finish():
    """Libraries and tests are there for good: searched for garbage again and again they took a seventh of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(400_000, 20, 20)
    gc.enable()


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and not (runtimes.mlx_gpu() or runtimes.cuda_required()):
        pytest.skip("MLX sees no GPU here")


@pytest.fixture(scope="session", autouse=True)
def one_stream():
    """`make test` runs a process a core. A training step that each would split over all cores takes a third more time
    of the processor than on one; `test_step.py` splits it by number, and processes that tests start have all cores."""
    if find_spec("mlx") is None:
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mlx_transformer.device.fast_cores", lambda: 1)
        yield


@pytest.fixture(scope="session", autouse=True)
def sessions_that_wait_asleep():
    """The same for ONNX Runtime: one thread for a session that isn't told how many, a fifteenth of the processor's time
    less; tests of several name them. And idle threads look for no work while a session is opened and run, without a
    pause: half of the time that sessions took."""

    class Asleep(onnxruntime.SessionOptions):
        def __init__(self) -> None:
            super().__init__()
            self.intra_op_num_threads = 1
            self.add_session_config_entry("session.intra_op.allow_spinning", "0")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(onnxruntime, "SessionOptions", Asleep)
        yield


@pytest.fixture(scope="module", autouse=True)
def the_same_inputs_in_ci(request):
    """As hypothesis's examples: the seed of a `validate` that is given none, and what MLX's own generator, which begins
    with the time, is for a file that doesn't seed it."""
    with pytest.MonkeyPatch.context() as patch:
        if "CI" in os.environ:
            drawn = random.Random(request.path.name)
            patch.setattr(secrets, "randbits", drawn.getrandbits)
            if find_spec("mlx") is not None:
                import mlx.core as mx

                mx.random.seed(drawn.getrandbits(32))
        yield


@pytest.fixture(scope="module", autouse=True)
def the_environment_as_it_was():
    """What a file leaves there, as some libraries do that it imports, no process hears that another file starts."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="session", autouse=True)
def nothing_said_of_delays():
    """That brief work has taken long is said in a line: of a busy machine, and not where a test looks for silence."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(progress, "LOG_SECONDS", PATIENCE)
        yield


@pytest.fixture(scope="module", autouse=True)
def only_new_garbage():
    """`gc.collect()`, which production and tests call, looks through what a file has made: what earlier ones left in
    caches, a million objects, took a third of a second each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def at_pace(monkeypatch):
    """at_pace(seconds): so much passes between a progress's looks at the clock; lines come as for people."""

    def begin(seconds: float) -> None:
        clock = itertools.count(0.0, seconds)
        monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: next(clock)))
        monkeypatch.setattr(progress, "LOG_SECONDS", 10.0)

    return begin


@pytest.fixture(scope="module")
def all_cores():
    """Runs of this file are split over them after all."""
    from mlx_transformer.system import machine

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mlx_transformer.device.fast_cores", machine.fast_cores)
        yield


@pytest.fixture
def on_cpu(monkeypatch):
    """MLX computes on the CPU, in subprocesses too: bits are promised there alone. A GPU adds up an embedding's
    gradient in whatever order its threads come."""
    import mlx.core as mx

    monkeypatch.setenv("MLX_TRANSFORMER_DEVICE", "cpu")
    with mx.stream(mx.cpu):
        yield


@pytest.fixture(params=DEVICE_CHOICES)
def device_choices(request):
    """Once with the choices of this machine's device and, where that is a CPU, once with a GPU's: the compiled step,
    batches of few shapes, a search that seldom asks. Files that have such a branch: `pytestmark = both_choices`."""
    from mlx_transformer.device import deciding_as

    if request.param == "own":
        yield "own"
        return
    with deciding_as(request.param):
        yield request.param


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory):
    """FOLDER/model and FOLDER/onnx: random weights, so that most outputs are broken UTF-8 of several kinds."""
    from small_models import write_text_model

    return write_text_model(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="session")
def text_model(text_folder):
    """The same in ONNX Runtime."""
    from export import OnnxTransformer

    return OnnxTransformer(text_folder / "onnx", threads=1)
