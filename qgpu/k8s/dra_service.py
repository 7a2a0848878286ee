"""What the kubelet asks of a DRA driver: to prepare claims before their containers start, and to give them up after.

Every answer is per claim: an error text makes the kubelet try that claim again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any
from weakref import WeakValueDictionary

import grpc
import structlog

from qgpu.errors import QgpuError, RefusedError
from qgpu.k8s import claims
from qgpu.k8s.cluster import Cluster
from qgpu.k8s.grpc_server import Handler
from qgpu.k8s.kubelet_api import DRA_V1, DRA_V1BETA1, Interface, Service
from qgpu.k8s.names import device_name
from qgpu.k8s.qgpud import Qgpud
from qgpu.model.prepared_grant import PreparedDevice

_log = structlog.get_logger("k8s.dra")

#: The versions of the interface that this driver tells the kubelet, the newest first.
VERSIONS = ("v1.DRAPlugin", "v1beta1.DRAPlugin", "v1alpha1.DRAResourceHealth")


class ClaimLocks:
    """One change to a claim's grant at a time; changes to others go on beside it."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        #: By UID. A lock goes when no thread holds it or waits for it.
        self._locks: WeakValueDictionary[str, threading.Lock] = WeakValueDictionary()

    def of(self, uid: str) -> AbstractContextManager[Any]:
        """Return the lock of a claim."""
        with self._guard:
            lock = self._locks.get(uid)
            if lock is None:
                self._locks[uid] = lock = threading.Lock()
            return lock


class DraPlugin:
    """The services of the DRA driver, for both versions of the kubelet's interface."""

    def __init__(
        self,
        cluster: Cluster,
        qgpud: Qgpud,
        locks: ClaimLocks,
        shared: Callable[[str], None],
        conflict: Callable[[], str],
    ) -> None:
        """Tell ``shared`` the UID of each claim that further pods may come to use.

        ``conflict`` says which driver advertises the same cards (``conflicts``); "" if there is none.
        """
        self._cluster = cluster
        self._qgpud = qgpud
        self._locks = locks
        self._shared = shared
        self._conflict = conflict

    def services(self) -> list[tuple[Service, dict[str, Handler]]]:
        """Return the services with what handles their calls."""
        return [(api.services["DRAPlugin"], self._handlers(api)) for api in (DRA_V1, DRA_V1BETA1)]

    def _handlers(self, api: Interface) -> dict[str, Handler]:
        messages = api.messages

        def prepare(request: Any, context: grpc.ServicerContext) -> Any:
            response = messages.NodePrepareResourcesResponse()
            for claim in request.claims:
                answer = response.claims[claim.uid]
                try:
                    devices = self._prepare(claim, context)
                except QgpuError as error:
                    _log.warning("claim not prepared", claim=f"{claim.namespace}/{claim.name}", error=str(error))
                    answer.error = str(error)
                else:
                    answer.devices.extend(_device_messages(messages, devices, self._cluster.node_name))
            return response

        def unprepare(request: Any, _context: grpc.ServicerContext) -> Any:
            response = messages.NodeUnprepareResourcesResponse()
            for claim in request.claims:
                answer = response.claims[claim.uid]
                try:
                    with self._locks.of(claim.uid):
                        self._qgpud.drop(claim.uid)
                except QgpuError as error:
                    _log.warning("claim not given up", claim=f"{claim.namespace}/{claim.name}", error=str(error))
                    answer.error = str(error)
                else:
                    _log.info("claim given up", claim=f"{claim.namespace}/{claim.name}", uid=claim.uid)
            return response

        return {"NodePrepareResources": prepare, "NodeUnprepareResources": unprepare}

    def _prepare(self, asked: Any, context: grpc.ServicerContext) -> list[tuple[PreparedDevice, str]]:
        """Prepare one claim; return its devices with their CDI names. Raises QgpuError."""
        with self._locks.of(asked.uid):
            if (conflict := self._conflict()) and self._is_new(asked.uid):  # a pod with a toleration ignores the taint
                raise RefusedError(f"claim {asked.namespace}/{asked.name}: not prepared; {conflict}")
            claim = self._cluster.claim(asked.namespace, asked.name)
            grant = claims.read(claim, asked.uid, self._cluster.node_name)
            if (policies := claims.policies(claim, self._cluster.node_name)) and self._is_new(asked.uid):
                claims.check_policies(claims.label(claim), policies, self._qgpud.node().cards)
            if not context.is_active():  # the kubelet has stopped waiting, and may have given up the claim
                raise QgpuError(f"{claims.label(claim)}: the kubelet did not wait for the API server")
            named = self._qgpud.prepare(grant)
            if claims.may_be_shared(claim):
                self._shared(asked.uid)
        cores = sum(device.grant.cores or 0 for device in grant.devices)
        _log.info(
            "claim prepared",
            claim=f"{grant.namespace}/{grant.name}",
            uid=grant.uid,
            devices=len(grant.devices),
            cores=cores,
        )
        return [(device, named[device.request, device.gpu, device.share]) for device in grant.devices]

    def _is_new(self, uid: str) -> bool:
        """Tell whether a claim was not prepared before. Raises QgpuError."""
        return all(grant["uid"] != uid for grant in self._qgpud.grants())


def _device_messages(messages: Any, devices: Iterable[tuple[PreparedDevice, str]], pool: str) -> Iterable[Any]:
    for device, cdi in devices:
        # A container names a request without its alternative. The kubelet gives it the devices of exactly that name.
        request = claims.base_request(device.request)
        message = messages.Device(
            request_names=[request], pool_name=pool, device_name=device_name(device.gpu), cdi_device_ids=[cdi]
        )
        if device.share and hasattr(message, "share_id"):
            message.share_id = device.share
        yield message
