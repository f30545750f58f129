"""Ctrl-C before anything has begun: one line and its status. For the first line of a program, so it imports nothing
that Python has not loaded by then."""

import _signal  # type: ignore[import-not-found]
import os


def stop_quietly(program: str) -> None:
    """End quietly until `process.run` takes over. For processes that are this program's, from their first line on."""

    def stop(number: int, frame: object) -> None:
        os.write(2, f"{program}: interrupted\n".encode())
        os._exit(130)

    stop.early = True  # type: ignore[attr-defined]
    if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
        _signal.signal(_signal.SIGINT, stop)
