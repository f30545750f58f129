"""A script's first lines that take from Python what only POSIX systems have, as on Windows."""

AS_WINDOWS = """
import os, platform, signal, sys, sysconfig
# What isn't ours is imported first: it would look for Windows itself.
import asyncio, click.shell_completion, ctypes, logging.handlers, multiprocessing, subprocess, zoneinfo
import httptools, numpy, onnx, onnx_ir, onnxruntime, onnxscript, rich.live, rich.progress, rich.table, safetensors.numpy
import starlette.applications, tokenizers, uvicorn

sysconfig.get_config_vars(), platform.uname()
for module in ("fcntl", "grp", "pty", "pwd", "resource", "termios", "tty"):
    sys.modules[module] = None
IN_OS = "fork getuid geteuid getgid getegid killpg mkfifo openpty sched_getaffinity sched_setaffinity sysconf uname "
IN_OS += "chown statvfs sendfile pread pwrite posix_fallocate wait4 nice getloadavg sync O_NONBLOCK O_CLOEXEC "
IN_OS += "O_DIRECTORY O_NOFOLLOW"
IN_SIGNAL = "SIGHUP SIGKILL SIGUSR1 SIGUSR2 SIGALRM SIGPIPE SIGCHLD SIGQUIT SIGSTOP SIGCONT SIGWINCH alarm setitimer "
IN_SIGNAL += "pthread_kill pthread_sigmask sigwait"
for module, names in ((os, IN_OS), (signal, IN_SIGNAL)):
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)
sys.platform = "win32"
"""
