"""The device-plugin mode: puts its parts together, and registers again whenever the kubelet has restarted."""

from __future__ import annotations

from collections.abc import Sequence

import structlog

from qgpu.errors import QgpuError
from qgpu.ipc.systemd import notify
from qgpu.k8s import conflicts, grpc_server, resources
from qgpu.k8s.device_plugin_service import DevicePlugin
from qgpu.k8s.grpc_server import SocketServer
from qgpu.k8s.kubelet_api import DEVICE_PLUGIN
from qgpu.k8s.node_lock import drop_other_modes_grants, serving
from qgpu.k8s.options import NodeConfig
from qgpu.k8s.qgpud import Qgpud
from qgpu.k8s.resources import Resource
from qgpu.k8s.threads import Threads
from qgpu.k8s.unit_allocator import UnitAllocator
from qgpu.k8s.unit_watch import UnitWatch
from qgpu.linux.repeated_error import RepeatedError
from qgpu.linux.shutdown import Shutdown

_log = structlog.get_logger("k8s")

_COMPARE_S = 10.0
_REGISTER_S = 5.0


def run(config: NodeConfig, served: Sequence[Resource], reserve: int, patience_s: float) -> None:
    """Serve until a signal. Raises QgpuError if another driver advertises the cards, or there are too many units."""
    with serving(config) as stop:
        _Driver(config, served, reserve, patience_s).run(stop)


class _Driver:
    """One process in device-plugin mode."""

    def __init__(self, config: NodeConfig, served: Sequence[Resource], reserve: int, patience_s: float) -> None:
        self._config = config
        self._served = served
        self._reserve = reserve
        self._qgpud = Qgpud(config.runtime_dir)
        self._allocator = UnitAllocator(self._qgpud, served, reserve, patience_s, config.kubelet.pod_resources)
        self._compare_s = min(_COMPARE_S, patience_s)
        self._units = UnitWatch(self._qgpud, served, reserve)
        self._plugins = [DevicePlugin(resource, self._allocator, self._units) for resource in served]
        directory = config.kubelet.device_plugins
        self._servers = [SocketServer(directory / each.endpoint, each.services()) for each in self._plugins]
        #: The identity of the kubelet's socket at which a plugin registered last, by the plugin's index.
        self._registered: dict[int, object] = {}
        self._failure = RepeatedError(_log, "not registered, trying again", "warning")

    def run(self, stop: Shutdown) -> None:
        """Serve until ``stop``. Raises QgpuError."""
        threads = Threads(stop)
        checked = False
        for server in self._servers:
            server.start()
        threads.start("compare", lambda: self._compare(stop))
        notify("READY=1")
        _log.info("serving", node=self._config.node, resources=[resource.name for resource in self._served])
        while True:
            self._units.conflict = conflicts.check(self._config.kubelet, self._units.conflict)
            node = self._units.poll()
            if node is not None and not checked:
                resources.check_units(self._served, node.cards, self._reserve)
                checked = drop_other_modes_grants(self._qgpud, device_plugin=True)
            if checked:
                self._register()
            if stop.wait(self._config.interval_s):
                break
        self._units.close()
        for server in self._servers:
            server.stop()
        threads.check()
        _log.info("stopped")

    def _register(self) -> None:
        """Listen and register again if the kubelet has removed a socket or has restarted."""
        socket = self._config.kubelet.device_plugin_registration
        method = DEVICE_PLUGIN.services["Registration"].methods["Register"]
        with self._failure.logged(QgpuError):
            for at, (plugin, server) in enumerate(zip(self._plugins, self._servers, strict=True)):
                renewed, kubelet = server.restore(), grpc_server.socket_identity(socket)
                if kubelet is not None and (renewed or self._registered.get(at) != kubelet):
                    self._registered.pop(at, None)
                    grpc_server.call(socket, method, plugin.registration, _REGISTER_S)
                    self._registered[at] = kubelet
                    _log.info("registered with the kubelet", endpoint=plugin.endpoint)

    def _compare(self, stop: Shutdown) -> None:
        while not stop.wait(self._compare_s):
            try:
                self._allocator.compare()
            except QgpuError as error:
                _log.info("not compared, trying again", error=str(error))
