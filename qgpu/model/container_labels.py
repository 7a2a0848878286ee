"""What Kubernetes calls the container behind a pod: labels for people and for metrics."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ContainerLabels:
    """A container's namespace, pod, name, and its claims with commas between; empty where it has none."""

    namespace: str = ""
    pod: str = ""
    container: str = ""
    claim: str = ""
