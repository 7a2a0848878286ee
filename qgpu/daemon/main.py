"""``qgpud``: its command line, and what cannot wait until the rest of it is loaded."""

from __future__ import annotations

import signal
from pathlib import Path

import click

import qgpu
from qgpu import program
from qgpu.ending import Ending
from qgpu.places import default_runtime_dir, default_state_dir
from qgpu.plane import Plane
from qgpu.sched.seccomp.kept import Kept
from qgpu.systemd import Store


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--config", "config_file", type=click.Path(path_type=Path), help="Configuration file (TOML).")
@click.option("--runtime-dir", type=program.Directory(), help="Where the control socket is made.")
@click.option(
    "--state-dir",
    type=program.Directory(),
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
    stop = Ending(signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # from the very start, so that the end is orderly
    directory = runtime_dir or default_runtime_dir()
    kept = Kept(Store(), directory)
    # Not before: where daemon and guardian died together, pods wait for what has just been started.
    from qgpu.daemon import whole

    whole.run(
        config_file, Plane(plane) if plane else None, sim_gpus, state_dir or default_state_dir(directory), kept, stop
    )


def main() -> None:
    """Run the daemon; end with one line and a documented code if it can't."""
    program.run("qgpud", command)


if __name__ == "__main__":
    main()
