"""The API server: what the driver reads and writes there, with the node's identity or a service account's.

The client is made again at intervals and after each failure, because the node's certificate on disk changes from time
to time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import httpx2 as httpx
import msgspec
from lightkube import Client
from lightkube.config.kubeconfig import KubeConfig, SingleConfig
from lightkube.core import decoders
from lightkube.core.exceptions import ApiError, ConfigError, LoadResourceError
from lightkube.resources.core_v1 import Node
from lightkube.resources.resource_v1 import ResourceClaim, ResourceSlice
from lightkube.types import on_error_raise

from qgpu.errors import ExitCode, InvalidValueError, QgpuError
from qgpu.k8s.names import DRIVER

_T = TypeVar("_T")

#: What lightkube and its libraries raise when a call fails; RecursionError for an object that its author nested deep.
_FAILURES = (httpx.HTTPError, ConfigError, LoadResourceError, msgspec.MsgspecError, OSError, ValueError, RecursionError)

_TIMEOUT_S = 10.0
_RENEWED_EVERY_S = 600.0
#: How long the server keeps a watch open.
_WATCH_S = 300


def _prepare_decoders() -> None:
    """Make msgspec build the decoders of our kinds while this process has one thread.

    It builds a decoder at first use. A second thread that uses a half-built decoder crashes the process (msgspec 0.22).
    """
    for kind in (Node, ResourceClaim, ResourceSlice):
        with suppress(msgspec.ValidationError):  # an empty object is invalid; the decoder is built all the same
            decoders.decode_object(b"{}", kind)
        decoders.decode_list(b'{"metadata": {}, "items": []}', kind)
    decoders.decode_status(b"{}")
    decoders.decode_watch_event(b'{"type": "", "object": {}}')


_prepare_decoders()


class ApiServerError(QgpuError):
    """The API server did not answer, or refused; what it said is in the text."""

    code = ExitCode.FAILED


class NotFoundError(ApiServerError):
    """There is no such object."""

    code = ExitCode.NOT_FOUND


class ForbiddenError(ApiServerError):
    """The identity has no permission. A node may read an object only while one of its pods refers to it."""

    code = ExitCode.NO_PERMISSION


class ConflictError(ApiServerError):
    """The object has changed meanwhile, or exists already."""

    code = ExitCode.REFUSED


_ERRORS: dict[int, type[ApiServerError]] = {403: ForbiddenError, 404: NotFoundError, 409: ConflictError}


class Cluster:
    """The API server for one node. Every call raises an ApiServerError if it fails."""

    def __init__(self, kubeconfig: Path | None, node: str) -> None:
        """Use a kubeconfig; without one, the service account of the pod that this runs in."""
        self._kubeconfig = kubeconfig
        self.node_name = node
        self._lock = threading.Lock()
        self._client: Client | None = None
        self._renew_at_s = 0.0

    def claim(self, namespace: str, name: str) -> ResourceClaim:
        """Return a claim."""
        return self._call(
            f"claim {namespace}/{name}", lambda client: client.get(ResourceClaim, name, namespace=namespace)
        )

    def node(self) -> Node:
        """Return our node."""
        return self._call(f"node {self.node_name}", lambda client: client.get(Node, self.node_name))

    def slice(self, name: str) -> ResourceSlice | None:
        """Return a slice of this node and our driver; None if there is none of that name.

        It looks in a list: for a slice that does not exist, the server answers a node with 403, not 404.
        """
        ours: dict[str, Any] = {"spec.nodeName": self.node_name, "spec.driver": DRIVER}
        found = self._call("ResourceSlices", lambda client: list(client.list(ResourceSlice, fields=ours)))
        return next((each for each in found if each.metadata is not None and each.metadata.name == name), None)

    def create_slice(self, wanted: ResourceSlice, dry_run: bool = False) -> ResourceSlice:
        """Create a slice; return it as the server keeps it, or would."""
        return self._call("ResourceSlice", lambda client: client.create(wanted, dry_run=dry_run))

    def replace_slice(self, wanted: ResourceSlice, dry_run: bool = False) -> ResourceSlice:
        """Replace a slice that has not changed since it was read; return it as the server keeps it, or would."""
        return self._call("ResourceSlice", lambda client: client.replace(wanted, dry_run=dry_run))

    def delete_slice(self, name: str) -> None:
        """Delete a slice, if it exists."""
        if self.slice(name) is not None:
            with suppress(NotFoundError):
                self._call(f"ResourceSlice {name}", lambda client: client.delete(ResourceSlice, name))

    def watch_slices(self) -> Iterator[tuple[str, ResourceSlice]]:
        """Yield the events of this node's slices of our driver, until the server ends the watch."""
        return self._watch(ResourceSlice, {"spec.nodeName": self.node_name, "spec.driver": DRIVER})

    def watch_node(self) -> Iterator[tuple[str, Node]]:
        """Yield the events of our node, until the server ends the watch."""
        return self._watch(Node, {"metadata.name": self.node_name})

    def _watch(self, kind: Any, fields: dict[str, Any]) -> Iterator[Any]:
        try:
            yield from self._current().watch(kind, fields=fields, server_timeout=_WATCH_S, on_error=on_error_raise)
        except _FAILURES as error:
            self._forget()
            raise _translated(f"watch of {kind.__name__}", error) from error

    def _call(self, what: str, call: Callable[[Client], _T]) -> _T:
        try:
            return call(self._current())
        except _FAILURES as error:
            translated = _translated(what, error)
            if type(translated) is ApiServerError:
                self._forget()
            raise translated from error

    def _current(self) -> Client:
        with self._lock:
            now_s = time.monotonic()
            if self._client is None or now_s > self._renew_at_s:
                self._client = Client(_identity(self._kubeconfig), timeout=httpx.Timeout(_TIMEOUT_S), trust_env=False)
                self._renew_at_s = now_s + _RENEWED_EVERY_S
            return self._client

    def _forget(self) -> None:
        with self._lock:
            self._client = None


def _identity(kubeconfig: Path | None) -> SingleConfig:
    """Return the API server and the identity to use there. Raises ConfigError."""
    try:
        config = KubeConfig.from_service_account() if kubeconfig is None else KubeConfig.from_file(kubeconfig)
        found = config.get()
    except Exception as error:  # for a broken file, lightkube and its parsers raise errors of many types
        raise ConfigError(_text(error)) from error
    if found is None:
        raise ConfigError("it has no current context")
    return found


def check_identity(kubeconfig: Path | None) -> None:
    """Raise InvalidValueError if there is no usable identity."""
    try:
        _identity(kubeconfig)
    except ConfigError as error:
        raise InvalidValueError(
            f"{kubeconfig or 'service account'}: {error}; give --kubeconfig the node's own, such as "
            "/etc/kubernetes/kubelet.conf"
        ) from error


def _translated(what: str, error: Exception) -> ApiServerError:
    if isinstance(error, ApiError):
        kind = _ERRORS.get(int(error.status.code or 0), ApiServerError)
        return kind(f"{what}: API server: {error.status.message}")
    return ApiServerError(f"{what}: no answer from the API server: {_text(error)}")


def _text(error: Exception) -> str:
    """Return an error on one line, even if its own text is empty."""
    return " ".join(str(error).split()) or type(error).__name__
