"""The command line of ``qgpu-k8s``: what it cannot do is one line and a documented exit code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from qgpu.k8s.names import KubeletDirectory
from tests.cli import programs

WITHOUT = "import sys; sys.modules['lightkube'] = sys.modules['grpc'] = None; from qgpu.k8s.main import main; main()"


@pytest.mark.parametrize("mode", ["dra", "device-plugin"])
def test_mode_without_the_extra_says_how_to_get_it(mode: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, mode], capture_output=True, text=True, timeout=programs.TIMEOUT_S, check=False
    )

    assert done.returncode == 3
    assert done.stderr.startswith("qgpu-k8s: ")
    assert "pip install 'qgpu[k8s]'" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "give --kubeconfig the node's own"),
        ("", "give --kubeconfig the node's own"),
        ("clusters: []", "give --kubeconfig the node's own"),
        ('{"clusters": [], "users": [], "contexts": [], "current-context": "x"}', "give --kubeconfig the node's own"),
    ],
)
def test_unusable_kubeconfig_is_refused_in_one_line(tmp_path: Path, content: str | None, says: str) -> None:
    path = tmp_path / "kubeconfig"
    if content is not None:
        path.write_text(content)
    done = programs.run("qgpu.k8s.main", "dra", "--kubeconfig", str(path), "--kubelet-dir", str(tmp_path / "kubelet"))

    assert done.returncode == 2, done.stderr
    assert says in done.stderr
    assert done.stderr.count("\n") == 1


def test_help_names_both_modes() -> None:
    done = programs.run("qgpu.k8s.main", "--help")

    assert done.returncode == 0
    assert "dra " in done.stdout
    assert "device-plugin " in done.stdout


def test_device_plugins_stay_where_every_kubelet_has_them() -> None:
    assert KubeletDirectory(Path("/data/kubelet")).device_plugin_registration == Path(
        "/var/lib/kubelet/device-plugins/kubelet.sock"
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ("--reserve", "much"),
        ("--shares", "0"),
        ("--memory-step", "x"),
        ("--memory-step", "0"),
        ("--memory-default", "0MiB"),
        ("--interval", "nan"),
        ("--resync", "inf"),
    ],
)
def test_bad_option_is_refused_in_one_line(arguments: tuple[str, str]) -> None:
    done = programs.run("qgpu.k8s.main", "dra", *arguments)

    assert done.returncode == 2
    assert done.stderr.startswith(f"qgpu-k8s dra: Invalid value for '{arguments[0]}': ")
    assert done.stderr.count("\n") == 1


def test_folder_that_cannot_be_the_kubelets_is_refused() -> None:
    done = programs.run("qgpu.k8s.main", "device-plugin", "--kubelet-dir", "/dev/null")

    assert done.returncode == 2
    assert done.stderr.startswith("qgpu-k8s: /dev/null/plugins/qgpu.io/lock: Not a directory; ")
