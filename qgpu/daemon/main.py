"""``qgpud``: its command line, and what cannot wait until the rest of it is loaded."""

from __future__ import annotations

import signal
from pathlib import Path

import click

import qgpu
from qgpu import entry_point
from qgpu.ipc.systemd import FdStore
from qgpu.linux.shutdown import Shutdown
from qgpu.model.plane_names import Plane
from qgpu.paths import default_runtime_dir, default_state_dir
from qgpu.planes.seccomp.restored_fds import RestoredFds


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--config", "config_file", type=click.Path(path_type=Path), help="Configuration file (TOML).")
@click.option("--runtime-dir", type=entry_point.Directory(), help="Where the control socket is made.")
@click.option(
    "--state-dir",
    type=entry_point.Directory(),
    envvar="STATE_DIRECTORY",
    help="Where what is set at run time is kept for the next daemon; /var/lib/qgpu for root's in /run/qgpu.",
)
@click.option("--plane", type=click.Choice([plane.value for plane in Plane]), help="By what means to share.")
@click.option("--sim-gpus", type=click.IntRange(1, 64), default=1, show_default=True, help="pGPUs to simulate.")
@click.version_option(qgpu.__version__)
def command(
    config_file: Path | None, runtime_dir: Path | None, state_dir: Path | None, plane: str | None, sim_gpus: int
) -> None:
    """Share this host's GPUs among pods, by policy."""
    stop = Shutdown(signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # from the very start, so that the end is orderly
    directory = runtime_dir or default_runtime_dir()
    kept = RestoredFds(FdStore(), directory)
    # Not before: where daemon and guardian died together, pods wait for what has just been started.
    from qgpu.daemon import app

    app.run(
        config_file, Plane(plane) if plane else None, sim_gpus, state_dir or default_state_dir(directory), kept, stop
    )


def main() -> None:
    """Run the daemon; end with one line and a documented code if it can't."""
    entry_point.run("qgpud", command)


if __name__ == "__main__":
    main()
