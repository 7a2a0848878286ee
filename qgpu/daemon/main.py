"""``qgpud``: its command line, and the few steps that must come before the slow imports."""

from __future__ import annotations

import signal
from pathlib import Path

import click

import qgpu
from qgpu import entry_point
from qgpu.entry_point import IntRange
from qgpu.ipc.systemd import FdStore
from qgpu.linux.hangups import Hangups
from qgpu.linux.shutdown import Shutdown
from qgpu.model.plane_names import Plane
from qgpu.paths import default_runtime_dir, default_state_dir
from qgpu.planes.seccomp.restored_fds import RestoredFds


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--config", "config_file", type=click.Path(path_type=Path, readable=False), help="Configuration file (TOML)."
)
@click.option("--runtime-dir", type=entry_point.Directory(), help="Directory of the control socket.")
@click.option(
    "--state-dir",
    type=entry_point.Directory(),
    envvar="STATE_DIRECTORY",
    help="Directory that keeps run-time settings for the next daemon; /var/lib/qgpu for root's daemon in /run/qgpu.",
)
@click.option("--plane", type=click.Choice([plane.value for plane in Plane]), help="How GPUs are shared.")
@click.option("--sim-gpus", type=IntRange(1, 64), default=1, show_default=True, help="pGPUs to simulate.")
@click.option("--sim-mig", type=IntRange(0, 7), default=0, help="MIG instances to make of each of them.")
@click.version_option(qgpu.__version__)
def command(
    config_file: Path | None,
    runtime_dir: Path | None,
    state_dir: Path | None,
    plane: str | None,
    sim_gpus: int,
    sim_mig: int,
) -> None:
    """Share this host's GPUs among pods, by policy."""
    stop, hangups = Shutdown(signal.SIGTERM, signal.SIGINT), Hangups()  # first, so that early signals are in order
    directory = runtime_dir or default_runtime_dir()
    kept = RestoredFds(FdStore(), directory)
    # Imported late: if daemon and guardian died together, pods wait for the guardian that RestoredFds just started.
    from qgpu.daemon import app

    kept_in = state_dir or default_state_dir(directory)
    app.run(config_file, Plane(plane) if plane else None, (sim_gpus, sim_mig), kept_in, kept, stop, hangups)


entry_point.show_examples(
    command,
    (
        "qgpud --config /etc/qgpu/qgpud.toml",
        "qgpud --plane sim --sim-gpus 4",
        "qgpud --plane sim --runtime-dir /tmp/try --state-dir /tmp/try/state",
    ),
)


def main() -> None:
    """Run the daemon. If it fails, end with one line on stderr and a documented exit code."""
    entry_point.run("qgpud", command)


if __name__ == "__main__":
    main()
