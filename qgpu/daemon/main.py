"""``qgpud``: the composition root. It reads the configuration, opens the plane, starts everything and ends it.

The order of the end mirrors that of the beginning: whatever happens in between, gates are opened before the
plane is let go.
"""

from __future__ import annotations

import os
import signal
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import click
import structlog

import qgpu
from qgpu import config as configuration
from qgpu import program
from qgpu.config import Config, MetricsCompat, Plane
from qgpu.control import Server, default_runtime_dir
from qgpu.daemon import log, planes, runtime
from qgpu.daemon.state import State, default_state_dir
from qgpu.errors import QgpuError
from qgpu.systemd import ALIVE, Store, notify

if TYPE_CHECKING:
    from qgpu.daemon.containers import Containers
    from qgpu.daemon.service import Service

_log = structlog.get_logger("qgpud")

#: How often the daemon looks after pods that have ended, and tells systemd that it lives.
_BEAT_S = 0.5


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--config", "config_file", type=click.Path(path_type=Path), help="Configuration file (TOML).")
@click.option("--runtime-dir", type=program.Directory(), help="Where the control socket is made.")
@click.option(
    "--state-dir",
    type=program.Directory(),
    envvar="STATE_DIRECTORY",
    help="Where what is set at run time is kept for the next daemon; /var/lib/qgpu for root's in /run/qgpu.",
)
@click.option("--plane", type=click.Choice([plane.value for plane in Plane]), help="By what means to share.")
@click.option("--sim-gpus", type=click.IntRange(1, 64), default=1, show_default=True, help="pGPUs to simulate.")
@click.version_option(qgpu.__version__)
def command(
    config_file: Path | None, runtime_dir: Path | None, state_dir: Path | None, plane: str | None, sim_gpus: int
) -> None:
    """Share this host's GPUs among pods, by policy."""
    config = configuration.load(config_file) if config_file else Config()
    log.configure(config.log_level, config.log_format)
    directory = runtime_dir or default_runtime_dir()
    stop = _stop_on_signals()
    store = Store()
    lock = runtime.hold(directory)
    chosen = planes.choose(Plane(plane) if plane else config.plane)
    state = State(state_dir or default_state_dir(directory))
    host = planes.open_host(chosen.plane, directory, sim_gpus, store)
    # Not before: where daemon and guardian died together, pods wait until here.
    from qgpu.daemon.containers import Containers, agent_socket
    from qgpu.daemon.service import Service
    from qgpu.metrics import exporter

    service = Service(host, chosen, config, state, agent_socket(chosen.plane, directory))
    try:
        with ExitStack() as ends:
            if config.metrics.listen is not None:
                endpoint = exporter.serve(
                    config.metrics.listen, service.counters.view, with_hami=config.metrics.compat is MetricsCompat.HAMI
                )
                ends.callback(endpoint.close)
            server = Server(directory, config.socket_mode, config.socket_gid, service.handle, store, service.trusts)
            ends.callback(server.close)
            containers = Containers(chosen.plane, host.pgpus(), directory, config, store, service.take_listener)
            ends.callback(containers.close)
            _log.info("ready", plane=chosen.plane.value, why=chosen.why, runtime_dir=str(directory))
            _watch(service, containers, stop)
    finally:
        service.close()
        os.close(lock)
    _log.info("stopped")


def _stop_on_signals() -> threading.Event:
    """Return an event that SIGTERM, SIGINT and SIGHUP set, so that the end is orderly from the very start."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: stop.set())
    return stop


def _watch(service: Service, containers: Containers, stop: threading.Event) -> None:
    """Stay until told to stop. Raises QgpuError when a loop has ended by itself."""
    notify("READY=1")
    trouble = ""
    while not stop.wait(_BEAT_S):
        if not service.alive:
            raise QgpuError("a scheduling loop has died; this is a defect, see the log above")
        try:
            service.reap()
            trouble = ""
        except QgpuError as error:  # a plane that is gone for the moment; its pods can wait
            if str(error) != trouble:
                trouble = str(error)
                _log.error("cannot look after pods, trying again", error=trouble)
        containers.refresh()
        notify(ALIVE)
    notify("STOPPING=1")


def main() -> None:
    """Run the daemon; end with one line and a documented code if it can't."""
    program.run("qgpud", command)


if __name__ == "__main__":
    main()
