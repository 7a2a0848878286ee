"""The daemon's composition root: reads the configuration, opens the plane, starts all parts and stops them.

Parts stop in reverse order. Whatever happens in between, gates open before the plane is released.
"""

from __future__ import annotations

import os
import resource
from contextlib import ExitStack
from pathlib import Path

import structlog

from qgpu import config as configuration
from qgpu import log
from qgpu.config import Config, MetricsCompat
from qgpu.daemon import plane_choice, runtime_dir
from qgpu.daemon.containers import Containers, agent_socket, claim_files
from qgpu.daemon.metrics_endpoint import MetricsEndpoint
from qgpu.daemon.prepared_grants import PreparedGrants
from qgpu.daemon.service import Service
from qgpu.daemon.state import State
from qgpu.errors import QgpuError
from qgpu.ipc.control_socket import Server
from qgpu.ipc.systemd import ALIVE, notify
from qgpu.linux import untrusted_fds
from qgpu.linux.shutdown import Shutdown
from qgpu.metrics import exporter
from qgpu.model.plane_names import Plane
from qgpu.planes.seccomp.restored_fds import RestoredFds

_log = structlog.get_logger("qgpud")

#: How often the daemon checks for ended pods, and tells systemd that it is alive.
_BEAT_S = 0.5


def run(
    config_file: Path | None,
    plane: Plane | None,
    sim_gpus: int,
    state_dir: Path | None,
    kept: RestoredFds,
    stop: Shutdown,
) -> None:
    """Run the daemon until ``stop`` is set. Raises QgpuError."""
    untrusted_fds.prepare()
    _take_room()
    config = configuration.load(config_file) if config_file else Config()
    log.configure(config.log_level, config.log_format)
    directory, store = kept.runtime_dir, kept.store
    lock = runtime_dir.hold(directory)
    chosen = plane_choice.choose(plane or config.plane)
    state = State(state_dir)
    host = plane_choice.open_host(chosen.plane, kept, sim_gpus)
    prepared = PreparedGrants(state_dir, host.pgpus(), claim_files(chosen.plane, host.pgpus(), directory, config))
    service = Service(host, chosen, config, state, agent_socket(chosen.plane, directory), prepared)
    try:
        with ExitStack() as ends:
            endpoint = _endpoint(service, config)
            if endpoint is not None:
                ends.callback(endpoint.close)
            server = Server(directory, config.socket_mode, config.socket_gid, service.handle, store, service.pod_of)
            ends.callback(server.close)
            containers = Containers(chosen.plane, host.pgpus(), directory, config, store, service.take_listener)
            ends.callback(containers.close)
            _log.info("ready", plane=chosen.plane.value, why=chosen.why, runtime_dir=str(directory))
            _watch(service, containers, prepared, endpoint, stop)
    finally:
        service.close()
        os.close(lock)
    _log.info("stopped")


def _take_room() -> None:
    """Raise the soft limit of descriptors to the hard limit: clients and pods need many, and we do not use select()."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _endpoint(service: Service, config: Config) -> MetricsEndpoint | None:
    """Serve metrics if configured. Raises ConfigError."""
    address = config.metrics.listen
    if address is None:
        return None
    with_hami = config.metrics.compat is MetricsCompat.HAMI
    return MetricsEndpoint(lambda: exporter.serve(address, service.counters.view, with_hami=with_hami))


def _watch(
    service: Service,
    containers: Containers,
    prepared: PreparedGrants,
    endpoint: MetricsEndpoint | None,
    stop: Shutdown,
) -> None:
    """Do the periodic work until told to stop. Raises QgpuError if a loop has died."""
    notify("READY=1")
    trouble = ""
    while not stop.wait(_BEAT_S):
        if not service.alive:
            raise QgpuError("a scheduling loop has died; this is a defect, see the log above")
        try:
            service.reap()
            trouble = ""
        except QgpuError as error:  # the plane is gone for the moment; ended pods can wait
            if str(error) != trouble:
                trouble = str(error)
                _log.error("cannot check for ended pods, trying again", error=trouble)
        containers.refresh()
        prepared.refresh()
        if endpoint is not None:
            endpoint.refresh()
        notify(ALIVE)
    notify("STOPPING=1")
