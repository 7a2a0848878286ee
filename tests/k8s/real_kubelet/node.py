"""A node with a kubelet, and qgpu's device plugin on it."""

from __future__ import annotations

import signal
import subprocess
import sys
from typing import Any

from tests.cli import programs
from tests.k8s.containerd.claims import granted
from tests.k8s.containerd.node import Node, until
from tests.k8s.real_kubelet.process import HOST, Kubelet

#: What the device plugin advertises.
RESOURCES = ("qgpu.io/cores", "qgpu.io/online-cores")
#: Names of other systems for time and memory, and the bytes of a unit of memory.
ALIASES = {
    "qgpu": ("tke.cloud.tencent.com/qgpu-core", "tke.cloud.tencent.com/qgpu-memory", 1 << 30),
    "hami": ("nvidia.com/gpucores", "nvidia.com/gpumem", 8 << 20),
    "vcuda": ("tencent.com/vcuda-core", "tencent.com/vcuda-memory", 256 << 20),
}

#: What a pod holds of one card: per cent (0: no quota), bytes, class.
Part = tuple[int, int, str]


class KubeletNode:
    """A node whose containers a kubelet starts."""

    def __init__(self, node: Node, kubelet: Kubelet) -> None:
        self.node, self.kubelet = node, kubelet
        self._plugin_log = kubelet.root / "plugin.log"
        self.start_plugin()

    def start_plugin(self) -> None:
        """Start the device plugin."""
        command = [sys.executable, "-m", "qgpu.k8s.main", "device-plugin", "--patience", "2", "--node-name", HOST]
        command += ["--memory-factor", "8", *(word for alias in ALIASES for word in ("--alias", alias))]
        paths = ["--kubelet-dir", str(self.kubelet.root), "--runtime-dir", str(self.node.daemon.runtime_dir)]
        paths += ["--device-plugin-dir", str(self.kubelet.root / "device-plugins")]
        before = self._registered()
        with self._plugin_log.open("a") as log:
            self._plugin = subprocess.Popen(
                [*command, *paths],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=programs.environment(),
            )
        until(lambda: self._registered() > before)

    def restart_kubelet(self, how: signal.Signals) -> None:
        """End the kubelet, start it again, and wait until the plugin has found it."""
        before = self._registered()
        self.kubelet.stop(how)
        self.kubelet.start()
        until(lambda: self._registered() > before)

    def _registered(self) -> int:
        """Return how often the kubelet has taken the plugin with all of its resources."""
        log = self._plugin_log.read_text() if self._plugin_log.exists() else ""
        return log.count("registered with the kubelet") // (len(RESOURCES) + 2 * len(ALIASES))

    def stop_plugin(self, how: signal.Signals = signal.SIGTERM) -> None:
        """End the device plugin."""
        self._plugin.send_signal(how)
        self._plugin.wait()

    def pods(self) -> dict[str, Any]:
        """Return the daemon's pods by name."""
        return self.node.pods()

    def run(self, name: str, percent: int, resource: str = RESOURCES[0], **more: Any) -> dict[int, Part]:
        """Run a pod with this much of a card; return what it holds once it runs: cores, memory and class by card."""
        self.kubelet.run(name, {resource: percent}, **more)
        until(lambda: self.pids(name))
        return self.held(name)

    def held(self, name: str) -> dict[int, Part]:
        """Return what the containers of a pod hold together.

        There is one, or two: this kubelet starts a container again if it looks for it just before it runs.
        """
        held: dict[int, Part] = {}
        for pod in self._of(name):
            for card, (cores, memory, pod_class, _) in granted(pod).items():
                before = held.get(card, (0, 0, pod_class))
                held[card] = before[0] + (cores or 0), before[1] + memory, pod_class
        return held

    def pids(self, name: str) -> set[int]:
        """Return the processes of a pod."""
        return {pid for pod in self._of(name) for pid in pod["pids"]}

    def _of(self, name: str) -> list[dict[str, Any]]:
        return [pod for pod in self.pods().values() if pod["pod"] == f"{name}-{HOST}"]

    def clear(self) -> None:
        """Take all pods away, and wait until the daemon has noticed."""
        self.kubelet.drop_all()
        until(lambda: not self.pods() and not self.node.call("grant.list")["grants"])

    def end(self) -> None:
        """End plugin and kubelet."""
        self.stop_plugin()
        self.kubelet.stop()
