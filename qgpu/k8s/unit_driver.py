"""The device-plugin mode: puts its parts together, and registers again whenever the kubelet has restarted."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path

import structlog

from qgpu import log
from qgpu.config import LogFormat, LogLevel
from qgpu.errors import QgpuError, RefusedError
from qgpu.ipc.systemd import notify
from qgpu.k8s import grpc_server, resources, rivals
from qgpu.k8s.device_plugin import DevicePlugin
from qgpu.k8s.grpc_server import SocketServer
from qgpu.k8s.kubelet_api import DEVICE_PLUGIN
from qgpu.k8s.one_mode import Mode, OneMode
from qgpu.k8s.options import Place
from qgpu.k8s.qgpud import Qgpud
from qgpu.k8s.resources import Resource
from qgpu.k8s.threads import Threads
from qgpu.k8s.unit_allocator import UnitAllocator
from qgpu.k8s.unit_stock import UnitStock
from qgpu.linux.shutdown import Shutdown

_log = structlog.get_logger("k8s")

_COMPARE_S = 10.0
_REGISTER_S = 5.0


def run(place: Place, served: Sequence[Resource], reserve: int, patience_s: float) -> None:
    """Serve until a signal. Raises QgpuError if another driver sells the cards, or there are too many units."""
    stop = Shutdown(signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    log.configure(LogLevel.INFO, LogFormat.AUTO)
    if rival := rivals.find(place.kubelet):
        raise RefusedError(rival)
    os.umask(0o077)  # sockets are the kubelet's alone
    with OneMode(place.kubelet) as mode:
        _Driver(place, served, reserve, patience_s).run(mode, stop)


class _Driver:
    """One process in device-plugin mode."""

    def __init__(self, place: Place, served: Sequence[Resource], reserve: int, patience_s: float) -> None:
        self._place = place
        self._served = served
        self._reserve = reserve
        self._qgpud = Qgpud(place.runtime_dir)
        self._allocator = UnitAllocator(self._qgpud, served, reserve, patience_s)
        self._compare_s = min(_COMPARE_S, patience_s)
        self._stock = UnitStock(self._qgpud, served, reserve)
        self._plugins = [DevicePlugin(resource, self._allocator, self._stock) for resource in served]
        directory = place.kubelet.device_plugins
        self._servers = [SocketServer(directory / each.endpoint, each.services()) for each in self._plugins]
        #: The kubelet's socket at which a plugin registered last, by its place in the list.
        self._registered: dict[int, object] = {}
        self._failing = False

    def run(self, mode: Mode, stop: Shutdown) -> None:
        """Serve until ``stop``. Raises QgpuError."""
        threads = Threads(stop)
        checked = False
        for server in self._servers:
            server.start()
        threads.start("compare", lambda: self._compare(stop))
        notify("READY=1")
        _log.info("serving", node=self._place.node, resources=[resource.name for resource in self._served])
        while True:
            self._look_for_rivals()
            node = self._stock.look()
            if node is not None and not checked:
                resources.check_units(self._served, node.cards, self._reserve)
                checked = mode.check(self._qgpud, device_plugin=True)
            if checked:
                self._register()
            if stop.wait(self._place.interval_s):
                break
        self._stock.close()
        for server in self._servers:
            server.stop()
        threads.check()
        _log.info("stopped")

    def _look_for_rivals(self) -> None:
        if (rival := rivals.find(self._place.kubelet)) != self._stock.rival:
            if rival:
                _log.error("no new pods on this node's cards", error=rival)
            self._stock.rival = rival

    def _register(self) -> None:
        """Listen and register again where the kubelet has removed a socket, or is another one."""
        socket = self._place.kubelet.device_plugin_registration
        method = DEVICE_PLUGIN.services["Registration"].methods["Register"]
        try:
            for at, (plugin, server) in enumerate(zip(self._plugins, self._servers, strict=True)):
                renewed, kubelet = server.restore(), _identity(socket)
                if kubelet is not None and (renewed or self._registered.get(at) != kubelet):
                    self._registered.pop(at, None)
                    grpc_server.call(socket, method, plugin.registration, _REGISTER_S)
                    self._registered[at] = kubelet
                    _log.info("registered with the kubelet", endpoint=plugin.endpoint)
            self._failing = False
        except QgpuError as error:
            if not self._failing:
                _log.warning("not registered, trying again", error=str(error))
            self._failing = True

    def _compare(self, stop: Shutdown) -> None:
        while not stop.wait(self._compare_s):
            try:
                self._allocator.compare(self._place.kubelet.pod_resources)
            except QgpuError as error:
                _log.info("not compared, trying again", error=str(error))


def _identity(path: Path) -> object:
    """Return what tells a socket from a later one at its path; None if there is none."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_ctime_ns
