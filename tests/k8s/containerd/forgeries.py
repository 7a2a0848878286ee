"""What a pod may say of itself to get more than its claim gives it: in annotations, and in its environment."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from tests.k8s.containerd.node import Node

#: The UID of another pod, and where the name of its claim's device goes.
OTHER = "11111111-aaaa-4bbb-8ccc-000000000002"
_DEVICE = "<device of another claim>"

_ANNOTATIONS = [
    {"qgpu.io/cores": "99"},
    {"qgpu.io/memory": "100GiB"},
    {"qgpu.io/class": "online"},
    {"qgpu.io/class": "online", "qgpu.io/latency-target": "1ms"},
    {"qgpu.io/name": "else"},
    {"tke.cloud.tencent.com/qgpu-core": "99"},
    {"tke.cloud.tencent.com/qgpu-memory": "100"},
    {"tke.cloud.tencent.com/app-class": "online"},
    {"nvidia.com/gpucores": "99"},
    {"nvidia.com/gpucores": "0"},
    {"nvidia.com/gpumem": "100000"},
    {"nvidia.com/priority": "0"},
    {"aliyun.com/gpu-core.percentage": "99"},
    {"aliyun.com/gpu-mem": "100"},
    {"cdi.k8s.io/mine": "qgpu.io/gpu=1"},
    {"cdi.k8s.io/mine": f"qgpu.io/claim={_DEVICE}"},
    {"io.kubernetes.cri.sandbox-uid": OTHER},
    {"io.kubernetes.pod.uid": OTHER},
    {"io.kubernetes.pod.namespace": "bank", "io.kubernetes.pod.name": "x", "io.kubernetes.container.name": "y"},
    {"io.kubernetes.cri-o.Labels": json.dumps({"qgpu.io/cores": "99"})},
]
_ENVIRONMENTS = [
    {"QGPU_CORES": "50"},
    {"QGPU_MEMORY": "100GiB"},
    {"QGPU_CLASS": "online"},
    {"QGPU_NAME": "else"},
    {"QGPU_LATENCY_TARGET": "1ms"},
    {"CUDA_DEVICE_SM_LIMIT": "50"},
    {"CUDA_DEVICE_MEMORY_LIMIT": "100g"},
    {"CUDA_TASK_PRIORITY": "0"},
    {"ALIYUN_COM_GPU_MEM_CONTAINER": "100"},
    {"NVIDIA_VISIBLE_DEVICES": "all"},
    {"QGPU_CLAIM_mine": _DEVICE},
    {"QGPU_CLAIM_mine": "none-such"},
    {"QGPU_GPU_1": "GPU-51300000-0000-0000-0000-000000000001"},
]


@dataclass(frozen=True, slots=True)
class Forgery:
    """Annotations of a pod, which its sandbox carries, or variables of its container."""

    annotations: Mapping[str, str]
    variables: Mapping[str, str]

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in (self.annotations | self.variables).items())[:50]

    def start(self, node: Node, uid: str, device: str, of_another: str) -> str:
        """Start a container that is given a prepared device; return what is said against it."""
        annotations, variables = (
            {name: value.replace(_DEVICE, of_another.partition("=")[2]) for name, value in said.items()}
            for said in (self.annotations, self.variables)
        )
        sandbox = node.runtime.sandbox("forger", uid, annotations=annotations)
        return node.runtime.run(sandbox, "model", device, env=variables)


FORGERIES = [
    *(Forgery(said, {}) for said in _ANNOTATIONS),
    *(Forgery({}, said) for said in _ENVIRONMENTS),
]
