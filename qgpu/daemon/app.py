"""The daemon's composition root: reads the configuration, opens the plane, starts all parts and stops them.

Parts stop in reverse order. Whatever happens in between, gates open before the plane is released.
"""

from __future__ import annotations

import gc
import resource
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import structlog

from qgpu import config as configuration
from qgpu import log
from qgpu.config import Config, MetricsCompat
from qgpu.daemon import plane_choice
from qgpu.daemon.container_runtimes import ContainerRuntimes, agent_socket, claim_files
from qgpu.daemon.control_requests import ControlRequests
from qgpu.daemon.events import Events
from qgpu.daemon.metrics_endpoint import MetricsEndpoint
from qgpu.daemon.prepared_grants import PreparedGrants
from qgpu.daemon.runtime_dir import RuntimeDir
from qgpu.daemon.settings_file import SettingsFile
from qgpu.daemon.suspension_file import SuspensionFile
from qgpu.errors import QgpuError
from qgpu.ipc.control_socket import Server
from qgpu.ipc.systemd import ALIVE, notify
from qgpu.linux import untrusted_fds
from qgpu.linux.hangups import Hangups
from qgpu.linux.repeated_error import RepeatedError
from qgpu.linux.shutdown import Shutdown
from qgpu.metrics import exporter
from qgpu.model.plane_names import Plane
from qgpu.planes.seccomp.restored_fds import RestoredFds

_log = structlog.get_logger("qgpud")

#: How often the daemon checks for ended pods, and tells systemd that it is alive.
_HOUSEKEEPING_S = 0.5


def run(
    config_file: Path | None,
    plane: Plane | None,
    simulated: tuple[int, int],
    state_dir: Path | None,
    kept: RestoredFds,
    stop: Shutdown,
    hangups: Hangups,
) -> None:
    """Run the daemon until ``stop`` is set. Raises QgpuError.

    ``simulated`` is how many cards the simulator has, and how many MIG instances each; 0: they are whole.
    """
    untrusted_fds.install_signal_handler()
    _raise_fd_limit()
    config = configuration.load(config_file) if config_file else Config()
    log.configure(config.log_level, config.log_format)
    directory, store = kept.runtime_dir, kept.store
    place = RuntimeDir(directory)
    chosen = plane_choice.choose(plane or config.plane)
    settings = SettingsFile(state_dir)
    settings.hold()
    host = plane_choice.open_host(chosen.plane, kept, simulated, directory, config.mig)
    prepared = PreparedGrants(state_dir, host.pgpus(), claim_files(chosen.plane, host.pgpus(), directory, config))
    moves, events = SuspensionFile(state_dir or directory), Events(state_dir)
    agent = agent_socket(chosen.plane, directory)
    requests = ControlRequests(host, chosen, config, settings, agent, prepared, events, moves, directory)
    try:
        with ExitStack() as ends:
            endpoint = _endpoint(requests, config)
            if endpoint is not None:
                ends.callback(endpoint.close)
            server = Server(directory, config.socket_mode, config.socket_gid, requests.handle, store, requests.pod_of)
            ends.callback(server.close)
            containers = ContainerRuntimes(
                chosen.plane, host.pgpus(), directory, config, store, requests.take_listener, requests.pod_around
            )
            ends.callback(containers.close)
            _log.info("ready", plane=chosen.plane.value, why=chosen.why, runtime_dir=str(directory))
            restored = partial(place.refresh, restore=(server.restore, containers.restore))
            _watch(requests, containers, prepared, endpoint, lambda: restored(server.reachable), stop, hangups)
    finally:
        requests.close()
        events.close()
        settings.close()
        place.close()
    _log.info("stopped")


def _raise_fd_limit() -> None:
    """Raise the soft limit of descriptors to the hard limit: clients and pods need many, and we do not use select()."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _endpoint(requests: ControlRequests, config: Config) -> MetricsEndpoint | None:
    """Serve metrics if configured. Raises ConfigError."""
    address = config.metrics.listen
    if address is None:
        return None
    with_hami = config.metrics.compat is MetricsCompat.HAMI
    return MetricsEndpoint(lambda: exporter.serve(address, requests.counters.view, with_hami=with_hami))


def _watch(
    requests: ControlRequests,
    containers: ContainerRuntimes,
    prepared: PreparedGrants,
    endpoint: MetricsEndpoint | None,
    restore: Callable[[], None],
    stop: Shutdown,
    hangups: Hangups,
) -> None:
    """Do the periodic work until told to stop. Raises QgpuError if a loop has died."""
    gc.freeze()  # what start made stays: to search all of it for garbage stops every thread for long
    notify("READY=1")
    reaping = RepeatedError(_log, "cannot check for ended pods, trying again")
    while not stop.wait(_HOUSEKEEPING_S):
        if not requests.alive:
            raise QgpuError("a scheduling loop has died; this is a defect, see the log above")
        with reaping.logged(QgpuError):  # while the plane is gone, ended pods can wait
            requests.reap()
        restore()
        if hangups.terminal_closed:
            _log.info("its terminal is closed")
            break
        if hangups.came():
            _log.warning("SIGHUP ignored; restart qgpud to read its configuration again")
        containers.refresh()
        prepared.refresh()
        if endpoint is not None:
            endpoint.refresh()
        notify(ALIVE)
    notify("STOPPING=1")
