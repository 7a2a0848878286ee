"""A gRPC server on a socket in the kubelet's directory, and the client's side for the kubelet's own sockets."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc

from qgpu.errors import DaemonUnreachableError, QgpuError
from qgpu.k8s.kubelet_api import Method, Service

#: Handles one call: takes the request and its context, and returns the response; for a stream, yields responses.
Handler = Callable[[Any, grpc.ServicerContext], Any]

_WORKERS = 32
_STOP_S = 2.0


class SocketServer:
    """Serves services at a path until it is stopped; a socket left by an earlier process is replaced."""

    def __init__(self, path: Path, services: Sequence[tuple[Service, Mapping[str, Handler]]]) -> None:
        self._path = path
        self._services = services
        self._server: grpc.Server | None = None
        self._identity: tuple[int, int, int] | None = None

    def start(self) -> None:
        """Listen. Raises QgpuError."""
        server = grpc.server(ThreadPoolExecutor(_WORKERS, thread_name_prefix=self._path.name))
        for service, handlers in self._services:
            server.add_generic_rpc_handlers((_handlers(service, handlers),))
        try:
            self._path.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
            # gRPC removes the path of its socket some time after the server has stopped; by then a later server may
            # listen there. And the kubelet calls a socket as soon as it sees it. So the socket is renamed.
            made = self._path.with_name(f".{self._path.name}.{os.getpid()}")
            server.add_insecure_port(f"unix:{made}")
            server.start()
            made.replace(self._path)
            self._identity = socket_identity(self._path)
        except (OSError, RuntimeError) as error:
            raise QgpuError(f"{self._path}: cannot listen: {' '.join(str(error).split())}") from error
        self._server = server

    def restore(self) -> bool:
        """Listen again if the socket was removed or replaced; return whether it was. Raises QgpuError."""
        if self._server is not None and socket_identity(self._path) == self._identity:
            return False
        self.stop(0)
        self.start()
        return True

    def stop(self, grace_s: float = _STOP_S) -> None:
        """Stop serving; calls have this long to end. The kubelet sees that the socket is gone."""
        if self._server is not None:
            if socket_identity(self._path) == self._identity:
                self._path.unlink(missing_ok=True)
            self._server.stop(grace_s).wait()
            self._server = None


def call(socket: Path, method: Method, request: Any, timeout_s: float) -> Any:
    """Make one call to a socket of the kubelet's. Raises DaemonUnreachableError."""
    with grpc.insecure_channel(f"unix:{socket}") as channel:
        stub = channel.unary_unary(
            method.path, request_serializer=_serialized, response_deserializer=method.response.FromString
        )
        try:
            return stub(request, timeout=timeout_s)
        except grpc.RpcError as error:
            detail = error.details() if isinstance(error, grpc.Call) else str(error)
            raise DaemonUnreachableError(f"{socket}: {detail}; is the kubelet running?") from error


def _handlers(service: Service, handlers: Mapping[str, Handler]) -> grpc.GenericRpcHandler:
    made = {}
    for name, method in service.methods.items():
        make = grpc.unary_stream_rpc_method_handler if method.streams else grpc.unary_unary_rpc_method_handler
        made[name] = make(
            handlers[name], request_deserializer=method.request.FromString, response_serializer=_serialized
        )
    return grpc.method_handlers_generic_handler(service.name, made)


def _serialized(message: Any) -> bytes:
    data: bytes = message.SerializeToString()
    return data


def socket_identity(path: Path) -> tuple[int, int, int] | None:
    """Return what tells a socket from a later one at its path (inodes are reused); None if there is no socket."""
    try:
        stat = path.lstat()
    except OSError:
        return None
    return stat.st_dev, stat.st_ino, stat.st_ctime_ns
