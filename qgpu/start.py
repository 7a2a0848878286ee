"""Starts the programs: Ctrl-C while their modules are loaded ends them at once, without a traceback."""

from __future__ import annotations

import importlib
import signal


def qgpud() -> None:
    """Run the daemon."""
    run("qgpu.daemon.main")


def qgpuctl() -> None:
    """Run the command line."""
    run("qgpu.cli.main")


def qgpu_load() -> None:
    """Run the load generator."""
    run("qgpu.load.main")


def qgpu_k8s() -> None:
    """Run the Kubernetes driver."""
    run("qgpu.k8s.main")


def run(module: str) -> None:
    """Run a module's ``main``. While it is imported, SIGINT has its default effect."""
    python = signal.getsignal(signal.SIGINT)
    if python is signal.default_int_handler:  # unless SIGINT is ignored, as in background jobs
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    main = importlib.import_module(module).main
    if python is signal.default_int_handler:
        signal.signal(signal.SIGINT, python)
    main()
