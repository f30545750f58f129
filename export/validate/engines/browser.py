"""Headless Chromium with one page (browser_page.js), which answers requests as web_host.py describes them: no driver.

The browser has a profile in a temporary folder. Chromium closes when its debugging pipe is closed.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path
from urllib.parse import urlencode

from numpy.typing import NDArray

from .protocol import Unavailable
from .web_host import Host

Array = NDArray

VARIABLE = "CHROMIUM"
PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "microsoft-edge")
MAC_APPS = ("Google Chrome", "Chromium", "Microsoft Edge")
# WebGPU on Linux too, through Vulkan, and on the processor where there is no GPU. No request to any other host.
FLAGS = (
    "--headless --enable-unsafe-webgpu --enable-features=Vulkan --disable-gpu-watchdog --no-first-run --mute-audio "
    "--disable-background-networking --disable-component-update --disable-sync --disable-extensions --disable-breakpad "
    "--no-default-browser-check --remote-debugging-pipe"
).split()
NOBODY_ELSE = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"
# The debugging pipe is read from descriptor 3 and written to 4: the one never says anything, the other nobody reads.
WITH_PIPE = 'exec "$@" 3<&0 4>/dev/null </dev/null'


def find_browser() -> str:
    """Find a browser made of Chromium: the program that the variable CHROMIUM names, or one under its usual names."""
    if configured := os.environ.get(VARIABLE):
        if (program := shutil.which(configured)) is None:
            raise Unavailable(f"runtime webgpu: {VARIABLE}={configured}: there is no such program")
        return program
    apps = [f"/Applications/{app}.app/Contents/MacOS/{app}" for app in MAC_APPS] if sys.platform == "darwin" else []
    for name in (*PROGRAMS, *apps):
        if (program := shutil.which(name)) is not None:
            return program
    raise Unavailable(
        f"runtime webgpu needs Chromium or Chrome: there is no {' or '.join(PROGRAMS[:3])}; install one (Debian: apt "
        f"install chromium), or name a program by the variable {VARIABLE}"
    )


class Browser(Host):
    """The browser. `Unavailable` where it doesn't start or lacks WebGPU."""

    name = "the browser"

    def __init__(self, package: Path, threads: int, adapter: str = ""):
        """package: of onnxruntime-web. adapter: "software" computes on the processor, though there be a GPU."""
        program, profile = find_browser(), tempfile.mkdtemp(prefix="validate-browser-")
        query = urlencode({"threads": threads, "adapter": adapter})
        is_root = hasattr(os, "geteuid") and os.geteuid() == 0  # by whom Chromium's sandbox can't be made
        flags = [*FLAGS, NOBODY_ELSE, f"--user-data-dir={profile}", *["--no-sandbox"] * is_root]
        shell = ["/bin/sh", "-c", WITH_PIPE, "sh", program, *flags]
        try:
            super().__init__(package, lambda address: [*shell, f"{address}?{query}"], profile)
        except RuntimeError as error:
            self.close()
            raise Unavailable(f"runtime webgpu: {program}: {error}; name another browser by {VARIABLE}") from error
