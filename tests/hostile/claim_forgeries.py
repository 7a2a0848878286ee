"""What a pod's author can write to get more than its claim holds: annotations, labels, variables, and their mixtures.

``python -m tests.hostile.claim_forgeries`` prints how many there are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

#: What a forgery writes for what it knows only when it is tried.
SIBLING, OTHERS, OTHER_CARD = "<sibling>", "<others>", "<other card>"

_CRI, _CRIO = "io.kubernetes.cri.sandbox-uid", "io.kubernetes.pod.uid"


@dataclass(frozen=True)
class Forgery:
    """One way, and the refusal that it meets; without one the container starts with what its claim holds."""

    name: str
    annotations: Mapping[str, str] = field(default_factory=dict)
    env: Sequence[str] = ()
    #: Devices that its runtime gives it although its pod has no claim of theirs.
    injected: Sequence[str] = ()
    nodes: Sequence[tuple[int, int]] = ()
    refused: str = ""


def _annotated(name: str, value: str, **more: str) -> Forgery:
    return Forgery(f"annotation {name}={value}", {name: value} | more)


def _labelled(text: str) -> Forgery:
    return Forgery(f"label {text}", {"io.kubernetes.cri-o.Labels": text})


def _environment(*entries: str, refused: str = "") -> Forgery:
    return Forgery(f"variable {' '.join(entries)}", env=entries, refused=refused)


_NOT_GIVEN = "which it was not given"
_NOT_RESERVED = "is not reserved for its Kubernetes pod"

FORGERIES: tuple[Forgery, ...] = (
    # limits by annotation, of every vendor
    _annotated("qgpu.io/cores", "99"),
    _annotated("qgpu.io/cores", "1"),
    _annotated("qgpu.io/cores", "all of it"),
    _annotated("qgpu.io/memory", "100GiB"),
    _annotated("qgpu.io/class", "online"),
    _annotated("qgpu.io/class", "online", **{"qgpu.io/latency-target": "1ms"}),
    _annotated("qgpu.io/name", "kube-system.admin.root"),
    _annotated("qgpu.io/claim", "mine"),
    _annotated("QGPU.IO/CORES", "99"),
    _annotated("tke.cloud.tencent.com/qgpu-core", "99"),
    _annotated("tke.cloud.tencent.com/qgpu-memory", "100"),
    _annotated("tke.cloud.tencent.com/app-class", "online"),
    _annotated("nvidia.com/gpucores", "0"),
    _annotated("nvidia.com/gpucores", "99", **{"qgpu.io/cores": "98"}),
    _annotated("nvidia.com/gpumem", "100000"),
    _annotated("nvidia.com/gpumem-percentage", "100"),
    _annotated("nvidia.com/priority", "0"),
    _annotated("aliyun.com/gpu-core.percentage", "99"),
    _annotated("aliyun.com/gpu-mem", "100"),
    # limits by label, as CRI-O passes them on
    _labelled(json.dumps({"qgpu.io/cores": "99", "qgpu.io/memory": "100GiB"})),
    _labelled(json.dumps({"qgpu.io/class": "online", "qgpu.io/name": "kube-system.admin.root"})),
    _labelled("{"),
    # limits by variable
    _environment("QGPU_CORES=99"),
    _environment("QGPU_CORES=1", "QGPU_CORES=99"),
    _environment("QGPU_MEMORY=100GiB"),
    _environment("QGPU_CLASS=online"),
    _environment("QGPU_CLASS=online", "QGPU_LATENCY_TARGET=1ms"),
    _environment("QGPU_NAME=kube-system.admin.root"),
    _environment("CUDA_DEVICE_SM_LIMIT=0"),
    _environment("CUDA_DEVICE_MEMORY_LIMIT=0"),
    _environment("CUDA_DEVICE_MEMORY_LIMIT_0=100g"),
    _environment("CUDA_TASK_PRIORITY=0"),
    _environment("ALIYUN_COM_GPU_MEM_CONTAINER=100"),
    _environment("NVIDIA_VISIBLE_DEVICES=all", "NVIDIA_DRIVER_CAPABILITIES=all"),
    # markers of prepared devices
    _environment(f"QGPU_CLAIM_x={SIBLING}", refused=_NOT_GIVEN),
    _environment(f"QGPU_CLAIM_x={OTHERS}", refused=_NOT_GIVEN),
    _environment(f"QGPU_CLAIM_x={OTHER_CARD}", refused=_NOT_GIVEN),
    _environment("QGPU_CLAIM_x=unknown", refused=_NOT_GIVEN),
    _environment("QGPU_CLAIM_=", refused=_NOT_GIVEN),
    _environment("QGPU_CLAIM_mine_s=mine-s", f"QGPU_CLAIM_mine_s={OTHERS}", refused=_NOT_GIVEN),
    _environment(f"QGPU_CLAIM_mine_s={OTHERS}", "QGPU_CLAIM_mine_s=mine-s", refused=_NOT_GIVEN),
    _environment("QGPU_CLAIM_x=qgpu.io/claim=mine-s", refused=_NOT_GIVEN),
    _environment("QGPU_CLAIM_x=MINE-S", refused=_NOT_GIVEN),
    _environment(f"qgpu_claim_x={OTHERS}"),
    _environment("QGPU_CLAIM_x=mine-s", "QGPU_CLAIM_y=mine-s"),
    # cards
    _environment("QGPU_GPU_1=GPU-other", refused="it reaches pGPU 1, of which no claim gives it a part"),
    Forgery("node of another card", nodes=[(195, 5)], refused="/dev/nvidia5 is not shared by qgpu"),
    # CDI devices that a pod names itself
    _annotated("cdi.k8s.io/mine", f"qgpu.io/claim={OTHERS}"),
    _annotated("cdi.k8s.io/mine", "qgpu.io/gpu=all"),
    Forgery("another pod's device", injected=[OTHERS], refused=_NOT_RESERVED),
    Forgery("another card's device", injected=[OTHER_CARD], refused=_NOT_RESERVED),
    Forgery("a device that is not there", injected=["unknown"], refused="there is no prepared device unknown"),
    # whose container it is
    Forgery("no UID", {_CRI: ""}, refused=_NOT_RESERVED),
    Forgery("an unknown UID", {_CRI: "pod-9"}, refused=_NOT_RESERVED),
    Forgery("a UID in capitals", {_CRI: "POD-1"}, refused=_NOT_RESERVED),
    Forgery("a part of a UID", {_CRI: "pod-"}, refused=_NOT_RESERVED),
    Forgery("another pod's UID for another runtime", {_CRIO: "pod-2"}, refused="differ"),
    Forgery("another pod's UID and its device", {_CRIO: "pod-2"}, injected=[OTHERS], refused="differ"),
    Forgery("another pod's UID by variable", env=[f"{_CRI}=pod-2"], injected=[OTHERS], refused=_NOT_RESERVED),
)

if __name__ == "__main__":
    print(len(FORGERIES))
