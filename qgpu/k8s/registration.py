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


class Registration:
    """The registration service of the DRA driver."""

    def __init__(self, endpoint: Path, versions: Sequence[str], accepted: Callable[[], None]) -> None:
        """Point the kubelet to an endpoint, and call ``accepted`` each time it accepts us."""
        self._endpoint = endpoint
        self._versions = list(versions)
        self._accepted = accepted

    def server(self, path: Path) -> SocketServer:
        """Return the server of the registration socket."""
        handlers = {"GetInfo": self._info, "NotifyRegistrationStatus": self._status}
        return SocketServer(path, [(REGISTRATION.services["Registration"], handlers)])

    def _info(self, _request: Any, _context: grpc.ServicerContext) -> Any:
        return REGISTRATION.messages.PluginInfo(
            type="DRAPlugin", name=DRIVER, endpoint=str(self._endpoint), supported_versions=self._versions
        )

    def _status(self, request: Any, _context: grpc.ServicerContext) -> Any:
        if request.plugin_registered:
            _log.info("registered with the kubelet")
            self._accepted()
        else:
            _log.error("the kubelet refuses us", error=request.error)
        return REGISTRATION.messages.RegistrationStatusResponse()
