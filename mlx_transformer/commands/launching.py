"""The command `launch`: train in several processes that work together."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Literal

from click.exceptions import Exit

from mlx_transformer.system.errors import UserError
from mlx_transformer.system.machine import usable_cores

from .parameters import Argument, Option

BY_THEMSELVES, ONCE_TOLD = 2.0, 5.0
"""After a process has failed: seconds for the others to end by themselves, then seconds after SIGTERM before they are
killed. MLX's ring may wait forever for a process that has ended."""
POLL_SECONDS = 0.05
MOST = max(16, 4 * usable_cores())
"""Most processes on one machine; each holds a model, its gradients and its optimizer's moments."""


def launch(
    command: Annotated[
        list[str], Argument(metavar="-- train ...", help="Command for each process: train with its options.")
    ],
    processes: Annotated[int | None, Option("--processes", "-n", help="Number of processes on this machine.")] = None,
    hostfile: Annotated[
        Path | None, Option(help="For several machines: mlx.launch's hostfile, one process a host.")
    ] = None,
    network: Annotated[
        Literal["ring", "mpi", "nccl", "jaccl"],
        Option(help="How processes talk: TCP (ring), MPI, NVIDIA's NCCL, or RDMA over Thunderbolt (jaccl)."),
    ] = "ring",
) -> None:
    """Train in several processes at once, on one machine or several.

    Each takes its share of every step's batches; the first writes the run's folder.
    """
    if command[0] != "train":
        raise UserError(f"launch runs train, not {command[0]!r}: launch -n 2 -- train ... --out FOLDER")
    if (processes is None) == (hostfile is None):
        raise UserError("give either -n, processes on this machine, or --hostfile")
    if hostfile is not None:
        if not hostfile.is_file():
            raise UserError(f"{hostfile}: no such hostfile; `mlx.distributed_config` makes one")
        _by_mlx(["--hostfile", str(hostfile)], network, command)
    elif processes is None or not 1 <= processes <= MOST:
        raise UserError(f"-n {processes}: give 1 to {MOST} processes (at most four per core)")
    elif network == "ring":
        raise Exit(_ring(processes, command))
    else:
        _by_program(network, processes, command)


def _program(command: list[str]) -> list[str]:
    return [sys.executable, "-m", "mlx_transformer", *command]


def _ring(processes: int, command: list[str]) -> int:
    """Run the processes with MLX's ring backend. Returns the exit status of rank 0, or of the first failed process."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        hosts = folder / "hosts.json"
        ports = [stack.enter_context(_port()).getsockname()[1] for _ in range(processes)]
        hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in ports]), encoding="utf-8")
        ranks: list[subprocess.Popen] = []
        for rank in range(processes):
            variables = dict(os.environ)
            if processes > 1:  # MLX can't build a ring of one process
                variables |= {"MLX_TRANSFORMER_DISTRIBUTED": "ring", "MLX_TRANSFORMER_LAUNCHER": str(os.getpid())}
                variables |= {"MLX_RANK": str(rank), "MLX_HOSTFILE": str(hosts)}
            # Only rank 0 prints; another rank's errors are shown if it fails.
            output = None if rank == 0 else stack.enter_context((folder / f"{rank}.txt").open("wb"))
            ranks.append(
                subprocess.Popen(
                    _program(command),
                    env=variables,
                    stdin=subprocess.DEVNULL,
                    stdout=None if rank == 0 else subprocess.DEVNULL,
                    stderr=output,
                    preexec_fn=_cores_of(rank, processes),
                )
            )
        before = [(number, signal.signal(number, _passed_on(ranks))) for number in (signal.SIGINT, signal.SIGTERM)]
        try:
            failed = _until_ended(ranks)
        finally:
            for number, handler in before:
                signal.signal(number, handler)
        if failed is None:
            return 0
        status = ranks[failed].returncode
        if status < 0:
            output = f"rank {failed} was ended by signal {-status}, so all ended; the last checkpoint is whole"
            print(f"mlx-transformer: {output}: go on with --resume", file=sys.stderr)
        elif status != ranks[0].returncode:
            text = (folder / f"{failed}.txt").read_text(encoding="utf-8", errors="replace")
            print(text.strip().split("\n")[-1], file=sys.stderr)
        return status if status > 0 else 2


def _until_ended(ranks: list[subprocess.Popen]) -> int | None:
    """Wait for all processes; returns the index of the first that failed, or None. After a failure, the other processes
    get some time, then SIGTERM, then SIGKILL."""
    failed, deadline, terminated = None, 0.0, False
    while any(rank.poll() is None for rank in ranks):
        if failed is None:
            failed = next((i for i, rank in enumerate(ranks) if rank.poll() not in (None, 0)), None)
            deadline = time.monotonic() + BY_THEMSELVES
        elif time.monotonic() > deadline:
            for rank in ranks:
                if rank.poll() is None:
                    rank.kill() if terminated else rank.terminate()
            terminated, deadline = True, time.monotonic() + ONCE_TOLD
        time.sleep(POLL_SECONDS)
    return failed if failed is not None else next((i for i, rank in enumerate(ranks) if rank.returncode), None)


def _passed_on(ranks: list[subprocess.Popen]):
    """A signal handler that passes signals on to the processes; a terminal itself sends them Ctrl-C."""

    at_terminal = sys.stdin is not None and sys.stdin.isatty()

    def handler(number: int, frame: object) -> None:
        for rank in ranks:
            if rank.poll() is None and not (number == signal.SIGINT and at_terminal):
                rank.send_signal(number)

    return handler


def _cores_of(rank: int, processes: int):
    """A function that binds the process to its own cores; None if the system can't, or has too few."""
    if not hasattr(os, "sched_setaffinity"):
        return None
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < processes:
        return None
    mine = set(cores[rank * len(cores) // processes : (rank + 1) * len(cores) // processes])
    return lambda: os.sched_setaffinity(0, mine)


def _port() -> socket.socket:
    """A socket that reserves a free port until MLX's ring binds to it, too (SO_REUSEPORT), which a rank does only after
    all its imports."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listener.bind(("127.0.0.1", 0))
    return listener


def _by_program(backend: str, processes: int, command: list[str]) -> None:
    """Replace this process by mpirun (for MPI) or mlx.launch (for the other backends)."""
    os.environ["MLX_TRANSFORMER_DISTRIBUTED"] = backend
    if backend != "mpi":
        _by_mlx(["-n", str(processes)], backend, command)
    names = [name for name in ("MLX_TRANSFORMER_DISTRIBUTED", "MLX_MPI_LIBNAME") if name in os.environ]
    as_root = ["--allow-run-as-root"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
    exported = [part for name in names for part in ("-x", name)]
    _become("mpirun", ["-n", str(processes), *as_root, *exported, *_program(command)])


def _by_mlx(places: list[str], backend: str, command: list[str]) -> None:
    options = [*places, "--backend", backend, "--env", f"MLX_TRANSFORMER_DISTRIBUTED={backend}"]
    _become("mlx.launch", [*options, "--", *_program(command)])


def _become(program: str, arguments: list[str]) -> None:
    neighbour = Path(sys.executable).with_name(program)
    executable = str(neighbour) if neighbour.is_file() else shutil.which(program)
    if executable is None:
        source = "Open MPI (Debian: openmpi-bin)" if program == "mpirun" else "mlx"
        raise UserError(f"{program}: not found; install {source}")
    os.execv(executable, [program, *arguments])
