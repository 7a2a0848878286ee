"""Only one ``qgpu-k8s`` serves a node: the DRA driver or the device plugin. Both would sell each card twice."""

from __future__ import annotations

import fcntl
import os

from qgpu.errors import (
    AlreadyRunningError,
    DaemonUnreachableError,
    PermissionDeniedError,
    RefusedError,
    TimedOutError,
)
from qgpu.k8s.device_units import is_device_plugins
from qgpu.k8s.names import DRIVER, KubeletDirectory
from qgpu.k8s.qgpud import Qgpud


class Mode:
    """The mode that this process holds."""

    def check(self, qgpud: Qgpud, device_plugin: bool) -> bool:
        """Give up what the other mode has left; tell whether qgpud did. Raises RefusedError if pods of it still run."""
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


class OneMode:
    """A lock in the kubelet's directory, held while the context lasts. Raises AlreadyRunningError."""

    def __init__(self, kubelet: KubeletDirectory) -> None:
        self._path = kubelet.plugins / DRIVER / "lock"
        self._fd = -1

    def __enter__(self) -> Mode:
        try:
            self._path.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._fd)
            raise AlreadyRunningError(f"{self._path}: another qgpu-k8s serves this node; stop it first") from error
        except OSError as error:
            raise PermissionDeniedError(f"{self._path}: {error.strerror}; run qgpu-k8s as root") from error
        return Mode()

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)
