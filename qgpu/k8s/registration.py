"""Registers a plugin with the kubelet, which looks for sockets in its folder ``plugins_registry``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
import structlog

from qgpu.k8s.grpc_server import SocketServer
from qgpu.k8s.kubelet_api import REGISTRATION
from qgpu.k8s.names import DRIVER

_log = structlog.get_logger("k8s.registration")


def server(path: Path, endpoint: Path, versions: Sequence[str], accepted: Callable[[], None]) -> SocketServer:
    """Return the server of the registration socket of the DRA driver at ``endpoint``.

    It calls ``accepted`` each time the kubelet accepts us.
    """

    def info(_request: Any, _context: grpc.ServicerContext) -> Any:
        return REGISTRATION.messages.PluginInfo(
            type="DRAPlugin", name=DRIVER, endpoint=str(endpoint), supported_versions=versions
        )

    def status(request: Any, _context: grpc.ServicerContext) -> Any:
        if request.plugin_registered:
            _log.info("registered with the kubelet")
            accepted()
        else:
            _log.error("the kubelet refuses us", error=request.error)
        return REGISTRATION.messages.RegistrationStatusResponse()

    handlers = {"GetInfo": info, "NotifyRegistrationStatus": status}
    return SocketServer(path, [(REGISTRATION.services["Registration"], handlers)])
