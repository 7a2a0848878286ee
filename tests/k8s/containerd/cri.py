"""The container runtime interface: what a kubelet says to containerd, from Python.

The messages are compiled from Debian's package of the interface when the tests run.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from tests import debian
from tests.k8s.containerd import engine, image

_PACKAGE = "golang-k8s-cri-api-dev"
_PROTO = Path("usr/share/gocode/src/k8s.io/cri-api/pkg/apis/runtime/v1/api.proto")
_TIMEOUT_S = 120


def description() -> Path:
    """Return the file that describes the interface, fetched if need be. Raises CalledProcessError."""
    root = debian.CACHE / "cri-api"
    with debian.alone(debian.CACHE):
        if not (root / _PROTO).exists():
            debian.unpack(_PACKAGE, engine.FORKY, debian.CACHE, root)
    return root / _PROTO


def messages(into: Path) -> Any:
    """Return the module of the interface's messages, compiled into a folder. Raises CalledProcessError."""
    (into / "cri_api.proto").write_bytes(description().read_bytes())
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{into}", f"--python_out={into}", "cri_api.proto"]
    subprocess.run(command, check=True, capture_output=True)
    if str(into) not in sys.path:
        sys.path.insert(0, str(into))
    return importlib.import_module("cri_api_pb2")


@dataclass
class Sandbox:
    """A pod's sandbox."""

    id: str
    uid: str
    config: Any


@dataclass
class Runtime:
    """The runtime service of one containerd."""

    channel: grpc.Channel
    api: Any
    #: The cgroup of all pods.
    cgroup_parent: str = "/qgpu-test"
    made: list[Sandbox] = field(default_factory=list)

    def call(self, verb: str, **fields: Any) -> Any:
        """Make a call. Raises grpc.RpcError."""
        ask, answer = getattr(self.api, f"{verb}Request"), getattr(self.api, f"{verb}Response")
        do = self.channel.unary_unary(
            f"/runtime.v1.RuntimeService/{verb}",
            request_serializer=ask.SerializeToString,
            response_deserializer=answer.FromString,
        )
        return do(ask(**fields), timeout=_TIMEOUT_S)

    def sandbox(self, name: str, uid: str = "", annotations: Mapping[str, str] = {}, attempt: int = 0) -> Sandbox:
        """Start a pod's sandbox on the host's network. Raises grpc.RpcError."""
        uid = uid or str(uuid.uuid4())
        node = self.api.NamespaceOption(network=self.api.NODE)
        config = self.api.PodSandboxConfig(
            metadata=self.api.PodSandboxMetadata(name=name, uid=uid, namespace="shop", attempt=attempt),
            annotations=annotations,
            log_directory="",
            linux=self.api.LinuxPodSandboxConfig(
                cgroup_parent=f"{self.cgroup_parent}/{uid}",
                security_context=self.api.LinuxSandboxSecurityContext(namespace_options=node),
            ),
        )
        found = self.call("RunPodSandbox", config=config).pod_sandbox_id
        self.made.append(Sandbox(found, uid, config))
        return self.made[-1]

    def create(
        self,
        sandbox: Sandbox,
        name: str,
        *devices: str,
        annotations: Mapping[str, str] = {},
        env: Mapping[str, str] = {},
        command: Sequence[str] = (),
        mounts: Mapping[str, str] = {},
        attempt: int = 0,
        **more: Any,
    ) -> str:
        """Create a container that is given CDI devices; return its id. Raises grpc.RpcError."""
        api = self.api
        config = api.ContainerConfig(
            metadata=api.ContainerMetadata(name=name, attempt=attempt),
            image=api.ImageSpec(image=image.NAME),
            command=command,
            annotations=annotations,
            envs=[api.KeyValue(key=key, value=value.encode()) for key, value in env.items()],
            mounts=[api.Mount(host_path=here, container_path=there) for there, here in mounts.items()],
            CDI_devices=[api.CDIDevice(name=device) for device in devices],
            linux=api.LinuxContainerConfig(
                security_context=api.LinuxContainerSecurityContext(
                    namespace_options=api.NamespaceOption(network=api.NODE), **more
                )
            ),
        )
        answer = self.call("CreateContainer", pod_sandbox_id=sandbox.id, config=config, sandbox_config=sandbox.config)
        return str(answer.container_id)

    def start(self, container: str) -> str:
        """Start a container; return what the runtime says against it, empty if it runs."""
        try:
            self.call("StartContainer", container_id=container)
        except grpc.RpcError as error:
            return str(error.details())
        return ""

    def run(self, sandbox: Sandbox, name: str, *devices: str, **options: Any) -> str:
        """Create and start a container; return what the runtime says against it, empty if it runs."""
        try:
            container = self.create(sandbox, name, *devices, **options)
        except grpc.RpcError as error:
            return str(error.details())
        return self.start(container)

    def end(self, sandbox: Sandbox) -> None:
        """Stop and remove a sandbox and its containers."""
        self.call("StopPodSandbox", pod_sandbox_id=sandbox.id)
        self.call("RemovePodSandbox", pod_sandbox_id=sandbox.id)
        self.made.remove(sandbox)

    def end_all(self) -> None:
        """End all sandboxes that were made here."""
        for sandbox in list(self.made):
            self.end(sandbox)

    def end_others(self) -> None:
        """End all sandboxes of this containerd, such as those that a kubelet has not come to end."""
        for sandbox in self.call("ListPodSandbox").items:
            self.call("StopPodSandbox", pod_sandbox_id=sandbox.id)
            self.call("RemovePodSandbox", pod_sandbox_id=sandbox.id)


def connected(containerd: engine.Containerd, api: Any, cgroup_parent: str = Runtime.cgroup_parent) -> Runtime:
    """Return the runtime service of a containerd; another one after each of its starts."""
    # by itself: a connection that was refused a moment ago keeps later ones waiting
    channel = grpc.insecure_channel(f"unix:{containerd.socket}", [("grpc.use_local_subchannel_pool", 1)])
    return Runtime(channel, api, cgroup_parent)


@contextmanager
def runtime(containerd: engine.Containerd, api: Any) -> Iterator[Runtime]:
    """Talk to a containerd; the sandboxes made end with the context."""
    found = connected(containerd, api)
    with found.channel:
        try:
            yield found
        finally:
            found.end_all()
            found.end_others()
            engine.remove_cgroups(found.cgroup_parent)
