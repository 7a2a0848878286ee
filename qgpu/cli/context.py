"""The context of every ``qgpuctl`` command: where the daemon is and how long to wait for it."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from qgpu.errors import DaemonUnreachableError, QgpuError, no_pgpu, no_pod

if TYPE_CHECKING:
    from qgpu.ipc.control_socket import Client

#: How often to look for a daemon that is not there yet, and after how long a person is told what we wait for.
_POLL_S, _SAY_AFTER_S = 0.05, 1.0


@dataclass(frozen=True, slots=True)
class Context:
    """The global options, which precede the command."""

    runtime_dir: Path
    timeout_s: float

    def connect(self) -> Client:
        """Connect to the daemon; one that is just starting has as long as ``timeout_s``.

        Raises DaemonUnreachableError.
        """
        from qgpu.ipc.control_socket import Client  # takes longer than all of --help

        started_s, said = time.monotonic(), not sys.stderr.isatty()
        while True:
            waited_s = time.monotonic() - started_s
            try:
                return Client(self.runtime_dir, self.timeout_s)
            except DaemonUnreachableError as error:
                absent = isinstance(error.__cause__, FileNotFoundError | ConnectionRefusedError)
                if not absent or waited_s >= self.timeout_s:
                    raise
            if not said and waited_s > _SAY_AFTER_S:
                said = True
                click.echo(f"qgpuctl: waiting for qgpud in {self.runtime_dir}, up to {self.timeout_s:g} s", err=True)
            time.sleep(_POLL_S)

    def ask(self, op: str, **arguments: Any) -> dict[str, Any]:
        """Make one request and return its answer, its pods in order. Raises a QgpuError."""
        with self.connect() as client:
            answer: dict[str, Any] = _checked(client.call(op, **arguments))
        if op == "pod.list":
            answer["pods"] = in_order(answer["pods"])
        return answer

    def pod(self, name: str) -> dict[str, Any]:
        """Return one pod. Raises UnknownNameError."""
        pods: list[dict[str, Any]] = self.ask("pod.list")["pods"]
        for pod in pods:
            if pod["name"] == name:
                return pod
        raise no_pod(name)

    def gpu(self, index: int) -> dict[str, Any]:
        """Return one pGPU. Raises UnknownNameError."""
        gpus: list[dict[str, Any]] = self.ask("gpu.list")["gpus"]
        for gpu in gpus:
            if gpu["index"] == index:
                return gpu
        raise no_pgpu(index, (gpu["index"] for gpu in gpus))


def in_order(pods: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return pods by their first pGPU, online ones first, then by name as people sort: the order of ``top``."""
    from qgpu.live_shares import natural  # see connect()

    def key(pod: dict[str, Any]) -> tuple[Any, ...]:
        first = [(grant["gpu"], grant["class"] != "online") for grant in pod["grants"][:1]]
        return first, natural(pod["name"])

    return sorted(pods, key=key)


def first_gpu(client: Client) -> int:
    """Return the pGPU of a command that names none: 0, else the first, as where all are MIG instances."""
    return min((gpu["index"] for gpu in client.call("gpu.list")["gpus"]), default=0)


class _Answer(dict[str, Any]):
    """A daemon's answer. What an older daemon does not tell is no defect of ours."""

    def __missing__(self, key: str) -> Any:
        raise QgpuError(f"qgpud: its answer has no {key!r}; is it older than qgpuctl? restart it")


def _checked(value: Any) -> Any:
    if isinstance(value, dict):
        return _Answer({key: _checked(each) for key, each in value.items()})
    return [_checked(each) for each in value] if isinstance(value, list) else value


pass_context = click.make_pass_decorator(Context)
