"""A small kubelet: finds plugins by their sockets, prepares the claims of its pods, and gives them up after.

What it has prepared is its checkpoint, which outlives it, as the real one's file does.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from qgpu.k8s.names import DRIVER, KubeletDirectory
from tests.k8s.api_server import ApiServer
from tests.k8s.wire import MESSAGES, STUBS

_TIMEOUT_S = 240.0
_POLL_S = 0.02
#: Each connection tries by itself, as in Go: else one that was refused a moment ago keeps later ones waiting.
_ALONE = [("grpc.use_local_subchannel_pool", 1)]


class EndedError(grpc.RpcError):
    """The kubelet ended meanwhile: what it had asked for is lost."""


@dataclass
class Prepared:
    """A claim that the driver was asked to prepare."""

    namespace: str
    name: str
    uid: str
    #: The UIDs of its pods here.
    pods: set[str]
    #: What the driver answered; None while it has not succeeded.
    devices: list[Any] | None = None


@dataclass
class Plugin:
    """A registered plugin."""

    info: Any
    identity: tuple[int, int]
    channel: grpc.Channel


@dataclass
class Kubelet:
    """The kubelet of one node."""

    root: Path
    api: ApiServer
    #: The newest version of the DRA interface that it speaks.
    speaks: tuple[str, ...] = ("v1", "v1beta1")
    checkpoint: dict[str, Prepared] = field(default_factory=dict)
    #: Units by resource name, as device plugins list them: name to health.
    units: dict[str, dict[str, str]] = field(default_factory=dict)
    #: The containers' units: (namespace, pod, container, resource) to names. Part of the checkpoint.
    held_units: dict[tuple[str, str, str, str], tuple[str, ...]] = field(default_factory=dict)
    registered: int = 0
    #: Resources whose plugins want to know of a container before it starts.
    told_of_starts: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.directory = KubeletDirectory(self.root, self.root / "device-plugins")
        for path in (self.directory.registry, self.directory.device_plugins, self.directory.pod_resources.parent):
            path.mkdir(parents=True, exist_ok=True)
        self.changed = threading.Condition()
        self.plugins: dict[str, Plugin] = {}
        self.device_plugins: dict[str, Any] = {}
        #: Held from an allocation until it is on record: a list of units shows it before a plugin misses it.
        self.allocating = threading.Lock()
        self._ended = threading.Event()
        self._ended.set()
        self._servers: list[grpc.Server] = []

    @property
    def running(self) -> bool:
        """Whether it runs."""
        return not self._ended.is_set()

    def start(self) -> None:
        """Start: delete the node's slices and old sockets, and look for plugins."""
        self._ended = threading.Event()
        self.plugins, self.device_plugins = {}, {}
        for path in self.directory.device_plugins.iterdir():
            path.unlink()
        self.wiped = False
        lister = _Lister(self)
        registry = _Registry(self)
        self._servers = [
            self._serve(
                self.directory.pod_resources, STUBS["pod_resources"].add_PodResourcesListerServicer_to_server, lister
            ),
            self._serve(
                self.directory.device_plugin_registration,
                STUBS["device_plugin"].add_RegistrationServicer_to_server,
                registry,
            ),
        ]
        threading.Thread(target=self._look, args=(self._ended,), daemon=True).start()

    def stop(self) -> None:
        """End as if killed: connections break, sockets stay."""
        self._ended.set()
        for server in self._servers:
            server.stop(0).wait()
        with self.changed:
            for plugin in self.plugins.values():
                plugin.channel.close()
            self.plugins, self.device_plugins = {}, {}
            self.units.clear()
            self.changed.notify_all()

    def wait_for(self, what: Callable[[], Any], timeout_s: float = _TIMEOUT_S) -> Any:
        """Wait until ``what`` is true, and return what it returned."""
        deadline = time.monotonic() + timeout_s
        while not (found := what()):
            assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
            with self.changed:
                self.changed.wait(_POLL_S)
        return found

    def stub(self, timeout_s: float = _TIMEOUT_S) -> tuple[Any, Any]:
        """Return the driver's stub and its messages, once it is registered."""
        plugin = self.wait_for(lambda: self.plugins.get(DRIVER), timeout_s)
        version = next(each for each in self.speaks if f"{each}.DRAPlugin" in plugin.info.supported_versions)
        return STUBS[f"dra_{version}"].DRAPluginStub(plugin.channel), MESSAGES[f"dra_{version}"]

    def health(self) -> Iterator[Any]:
        """Follow the health of devices."""
        plugin = self.wait_for(lambda: self.plugins.get(DRIVER))
        stub = STUBS["dra_health"].DRAResourceHealthStub(plugin.channel)
        request = MESSAGES["dra_health"].NodeWatchResourcesRequest()
        stream: Iterator[Any] = stub.NodeWatchResources(request, timeout=_TIMEOUT_S)
        return stream

    def prepare(self, claim: dict[str, Any], pod: str, plugin_s: float = _TIMEOUT_S) -> str:
        """Prepare a claim for a pod, as for a pod that starts; return an error, "" for success.

        ``plugin_s`` is how long to wait for a plugin that is not registered.
        """
        metadata = claim["metadata"]
        known = self.checkpoint.setdefault(
            metadata["uid"], Prepared(metadata["namespace"], metadata["name"], metadata["uid"], set())
        )
        known.pods.add(pod)
        if known.devices is not None:
            return ""  # a claim is prepared once, however many pods use it
        try:
            stub, messages = self.stub(plugin_s)
            asked = messages.Claim(namespace=known.namespace, name=known.name, uid=known.uid)
            answer = stub.NodePrepareResources(messages.NodePrepareResourcesRequest(claims=[asked]), timeout=_TIMEOUT_S)
        except (grpc.RpcError, AssertionError, ValueError) as error:
            return f"kubelet: {error!r}"
        found = answer.claims[known.uid]
        if not found.error:
            known.devices = list(found.devices)
        return str(found.error)

    def names(self, uid: str) -> list[str]:
        """The CDI devices that a prepared claim's containers get."""
        return [name for device in self.checkpoint[uid].devices or () for name in device.cdi_device_ids]

    def prepared(self, uid: str) -> bool:
        """Whether the driver has prepared a claim."""
        known = self.checkpoint.get(uid)
        return known is not None and known.devices is not None

    def unprepare(self, uid: str, plugin_s: float = _TIMEOUT_S) -> str:
        """Give up a claim; return an error, "" for success."""
        known = self.checkpoint[uid]
        try:
            stub, messages = self.stub(plugin_s)
            asked = messages.Claim(namespace=known.namespace, name=known.name, uid=known.uid)
            answer = stub.NodeUnprepareResources(
                messages.NodeUnprepareResourcesRequest(claims=[asked]), timeout=_TIMEOUT_S
            )
        except (grpc.RpcError, AssertionError, ValueError) as error:
            return f"kubelet: {error!r}"
        error = str(answer.claims[uid].error)
        if not error:
            del self.checkpoint[uid]
        return error

    def allocate(
        self, resource: str, count: int, pod: str, *, units: list[str] | None = None, container: str = "main"
    ) -> Any:
        """Allocate units of a resource to a pod's container, as for a pod that starts; return what it gets.

        The kubelet asks the plugin which units to take, unless ``units`` are given. Raises grpc.RpcError.
        """
        messages = MESSAGES["device_plugin"]
        self.wait_for(lambda: not self.running or (resource in self.device_plugins and resource in self.units))
        if (stub := self.device_plugins.get(resource)) is None:
            raise EndedError
        taken = {name for (_, _, _, of), names in self.held_units.items() if of == resource for name in names}
        if units is None:
            free = [name for name, health in self.units[resource].items() if health == "Healthy" and name not in taken]
            asked = messages.ContainerPreferredAllocationRequest(available_deviceIDs=free, allocation_size=count)
            answer = stub.GetPreferredAllocation(messages.PreferredAllocationRequest(container_requests=[asked]))
            units = list(answer.container_responses[0].deviceIDs)
            assert len(units) == count
        request = messages.ContainerAllocateRequest(devices_ids=units)
        with self.allocating:
            answer = stub.Allocate(messages.AllocateRequest(container_requests=[request]))
            self.held_units["team", pod, container, resource] = tuple(units)
        return answer.container_responses[0]

    def pre_start(self, pod: str, container: str = "main") -> None:
        """Tell plugins that a pod's container is about to start, those that want to know. Raises grpc.RpcError."""
        messages = MESSAGES["device_plugin"]
        for (_, *names, resource), units in list(self.held_units.items()):
            if names == [pod, container] and resource in self.told_of_starts:
                stub = self.wait_for(lambda of=resource: self.device_plugins.get(of))
                stub.PreStartContainer(messages.PreStartContainerRequest(devices_ids=units))

    def release(self, pod: str) -> None:
        """Free a pod's units. No plugin is told."""
        for key in [key for key in self.held_units if key[1] == pod]:
            del self.held_units[key]

    def healthy(self, resource: str, card: str = "") -> int:
        """How many units of a resource are healthy, on one card or on all."""
        units = self.units.get(resource, {})
        return sum(health == "Healthy" for name, health in units.items() if name.startswith(card))

    def _serve(self, path: Path, add: Callable[[Any, grpc.Server], None], service: Any) -> grpc.Server:
        server = grpc.server(ThreadPoolExecutor(8))
        add(service, server)
        made = path.with_suffix(".new")  # which gRPC removes after the server has stopped
        server.add_insecure_port(f"unix:{made}")
        server.start()
        made.replace(path)
        return server

    def _look(self, ended: threading.Event) -> None:
        """Register what appears in the registry, and drop what goes."""
        while not ended.wait(_POLL_S):
            if not self.wiped and self.api.running:
                self.api.wipe_slices()
                self.wiped = True
            sockets = {}
            for path in self.directory.registry.glob("*.sock"):
                try:
                    stat = path.stat()
                    sockets[path] = stat.st_ino, stat.st_ctime_ns
                except OSError:
                    continue
            with self.changed:
                for name, plugin in list(self.plugins.items()):
                    if plugin.identity not in sockets.values():
                        plugin.channel.close()
                        del self.plugins[name]
                known = {plugin.identity for plugin in self.plugins.values()}
            for path, identity in sockets.items():
                if identity not in known:
                    self._register(path, identity, ended)

    def _register(self, path: Path, identity: tuple[int, int], ended: threading.Event) -> None:
        messages = MESSAGES["registration"]
        try:
            with grpc.insecure_channel(f"unix:{path}", _ALONE) as channel:
                stub = STUBS["registration"].RegistrationStub(channel)
                info = stub.GetInfo(messages.InfoRequest(), timeout=1)
                assert info.type == "DRAPlugin"
                if ended.is_set():
                    return
                with self.changed:
                    endpoint = grpc.insecure_channel(f"unix:{info.endpoint}", _ALONE)
                    self.plugins[info.name] = Plugin(info, identity, endpoint)
                    self.registered += 1
                    self.changed.notify_all()
                stub.NotifyRegistrationStatus(messages.RegistrationStatus(plugin_registered=True), timeout=1)
        except grpc.RpcError:
            pass  # a socket of a plugin that is gone, or has just begun


#: The name of init containers, of which the kubelet's list says nothing.
INIT = "init"


class _Lister:
    """What the kubelet says about its containers."""

    def __init__(self, kubelet: Kubelet) -> None:
        self._kubelet = kubelet

    def List(self, _request: Any, _context: Any) -> Any:  # noqa: N802 - gRPC's name
        messages = MESSAGES["pod_resources"]
        response = messages.ListPodResourcesResponse()
        for known in list(self._kubelet.checkpoint.values()):
            for uid in sorted(known.pods):
                pod = response.pod_resources.add(name=f"pod-{uid}", namespace=known.namespace)
                pod.containers.add(name="main").dynamic_resources.add(
                    claim_name=known.name, claim_namespace=known.namespace
                )
        with self._kubelet.allocating:
            held_units = dict(self._kubelet.held_units)
        for (namespace, name, container, resource), units in held_units.items():
            if container == INIT:
                continue
            pod = response.pod_resources.add(name=name, namespace=namespace)
            pod.containers.add(name=container).devices.add(resource_name=resource, device_ids=units)
        return response


class _Registry:
    """Where device plugins make themselves known."""

    def __init__(self, kubelet: Kubelet) -> None:
        self._kubelet = kubelet

    def Register(self, request: Any, _context: Any) -> Any:  # noqa: N802 - gRPC's name
        kubelet = self._kubelet
        channel = grpc.insecure_channel(f"unix:{kubelet.directory.device_plugins / request.endpoint}", _ALONE)
        stub = STUBS["device_plugin"].DevicePluginStub(channel)
        with kubelet.changed:
            kubelet.device_plugins[request.resource_name] = stub
            if request.options.pre_start_required:
                kubelet.told_of_starts.add(request.resource_name)
            kubelet.registered += 1
            kubelet.changed.notify_all()
        threading.Thread(target=self._follow, args=(request.resource_name, stub), daemon=True).start()
        return MESSAGES["device_plugin"].Empty()

    def _follow(self, resource: str, stub: Any) -> None:
        kubelet = self._kubelet
        try:
            for update in stub.ListAndWatch(MESSAGES["device_plugin"].Empty()):
                with kubelet.changed:
                    if kubelet.device_plugins.get(resource) is not stub:
                        return
                    kubelet.units[resource] = {device.ID: device.health for device in update.devices}
                    kubelet.changed.notify_all()
        except grpc.RpcError:
            pass
