"""The lock that lets only one ``qgpu-k8s`` serve a node: two modes would both advertise each card."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from qgpu import log
from qgpu.config import LogFormat, LogLevel
from qgpu.errors import AlreadyRunningError, DaemonUnreachableError, RefusedError, TimedOutError, unusable
from qgpu.k8s import conflicts
from qgpu.k8s.device_units import is_device_plugins
from qgpu.k8s.names import DRIVER, KubeletDirectory
from qgpu.k8s.options import NodeConfig
from qgpu.k8s.qgpud import Qgpud
from qgpu.linux import lock_file
from qgpu.linux.shutdown import Shutdown


@contextmanager
def serving(config: NodeConfig) -> Iterator[Shutdown]:
    """Hold the node's lock, and yield the shutdown that a signal sets. Raises QgpuError."""
    stop = Shutdown(signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    log.configure(LogLevel.INFO, LogFormat.AUTO)
    if conflict := conflicts.find(config.kubelet):
        raise RefusedError(conflict)
    os.umask(0o077)  # only root, as which the kubelet runs, may use the sockets
    with _node_lock(config.kubelet):
        yield stop


@contextmanager
def _node_lock(kubelet: KubeletDirectory) -> Iterator[None]:
    """Hold a lock in the kubelet's directory. Raises QgpuError."""
    path = kubelet.plugins / DRIVER / "lock"
    try:
        path.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
        fd = lock_file.lock(path)
    except BlockingIOError as error:
        raise AlreadyRunningError(f"{path}: another qgpu-k8s serves this node; stop it first") from error
    except OSError as error:
        raise unusable(path, "run qgpu-k8s as root, with the kubelet's --kubelet-dir", error) from error
    try:
        yield
    finally:
        os.close(fd)


def drop_other_modes_grants(qgpud: Qgpud, *, device_plugin: bool) -> bool:
    """Drop the other mode's grants; return whether qgpud answered. The caller holds the lock.

    Raises RefusedError if pods of the other mode still run.
    """
    left = []
    try:
        for grant in qgpud.grants():
            if is_device_plugins(grant["uid"]) != device_plugin:
                try:
                    qgpud.drop(grant["uid"])
                except RefusedError:
                    left.append(grant["name"])
    except (DaemonUnreachableError, TimedOutError):
        return False
    if left:
        raise RefusedError(
            f"{len(left)} grants of {'the DRA driver' if device_plugin else 'the device plugin'} are still used, "
            f"such as {left[0]}; drain the node before its mode changes"
        )
    return True
