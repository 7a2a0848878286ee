"""The DRA driver: puts its parts together, starts them, and keeps its sockets in place until it is told to end.

An error of the API server, of qgpud or of the kubelet never ends it.
"""

from __future__ import annotations

from pathlib import Path

import structlog

from qgpu.errors import QgpuError
from qgpu.ipc.systemd import notify
from qgpu.k8s import conflicts, registration
from qgpu.k8s.card_watch import CardWatch
from qgpu.k8s.cluster import Cluster, check_identity
from qgpu.k8s.dra_service import VERSIONS, ClaimLocks, DraPlugin
from qgpu.k8s.grpc_server import SocketServer
from qgpu.k8s.health import HealthStream
from qgpu.k8s.kubelet_api import DRA_HEALTH
from qgpu.k8s.node_lock import drop_other_modes_grants, serving
from qgpu.k8s.options import NodeConfig
from qgpu.k8s.publisher import Publisher
from qgpu.k8s.qgpud import Qgpud
from qgpu.k8s.resource_slices import SharingOptions
from qgpu.k8s.resync import Resync
from qgpu.k8s.threads import Threads
from qgpu.linux.shutdown import Shutdown

_log = structlog.get_logger("k8s")


def run(config: NodeConfig, kubeconfig: Path | None, sharing: SharingOptions, resync_s: float) -> None:
    """Serve until a signal. Raises QgpuError if another driver advertises the cards, or there is no identity."""
    check_identity(kubeconfig)
    with serving(config) as stop:
        _serve(config, Cluster(kubeconfig, config.node), sharing, resync_s, stop)


def _serve(config: NodeConfig, cluster: Cluster, sharing: SharingOptions, resync_s: float, stop: Shutdown) -> None:
    qgpud, locks = Qgpud(config.runtime_dir), ClaimLocks()
    cards = CardWatch(qgpud)
    publisher = Publisher(cluster, cards, sharing)
    resync = Resync(cluster, qgpud, locks, config.kubelet.pod_resources)
    plugin = DraPlugin(cluster, qgpud, locks, resync.follow, lambda: publisher.conflict)
    health = DRA_HEALTH.services["DRAResourceHealth"], {"NodeWatchResources": HealthStream(cards, config.node).watch}
    kubelet = config.kubelet
    # The kubelet calls the plugin's socket as soon as it finds the registration socket.
    servers = [
        SocketServer(kubelet.dra_socket, [*plugin.services(), health]),
        registration.server(kubelet.registration_socket, kubelet.dra_socket, VERSIONS, publisher.check_again),
    ]
    for server in servers:
        server.start()
    threads = Threads(stop)
    publisher.start(threads)
    threads.start("resync", lambda: resync.run(stop.wait, resync_s))
    notify("READY=1")
    _log.info("serving", node=config.node, socket=str(config.kubelet.dra_socket))
    _look_after(config, qgpud, servers, cards, publisher, stop)
    cards.close()
    for server in reversed(servers):
        server.stop()
    threads.check()
    _log.info("stopped")


def _look_after(
    config: NodeConfig,
    qgpud: Qgpud,
    servers: list[SocketServer],
    cards: CardWatch,
    publisher: Publisher,
    stop: Shutdown,
) -> None:
    """Look after sockets, cards and conflicting drivers until ``stop``.

    Raises RefusedError if the device plugin's pods still run.
    """
    dropped = False  # the device plugin's grants
    while True:
        cards.poll()
        if not dropped and cards.value.node is not None:
            dropped = drop_other_modes_grants(qgpud, device_plugin=False)
        if (conflict := conflicts.check(config.kubelet, publisher.conflict)) != publisher.conflict:
            publisher.conflict = conflict
            cards.wake()
        for server in servers:
            try:
                if server.restore():
                    _log.warning("socket was gone, listening again")
            except QgpuError as error:
                _log.error("socket is gone, trying again", error=str(error))
        if stop.wait(config.interval_s):
            return
