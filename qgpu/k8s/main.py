"""``qgpu-k8s``: its command line. The modes themselves are imported late, because they need the extra ``k8s``."""

from __future__ import annotations

import faulthandler
from pathlib import Path

import click

import qgpu
from qgpu import entry_point
from qgpu.errors import NotSupportedError
from qgpu.k8s.options import POSITIVE_SIZE, NodeConfig, node_options, reserve_option


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(qgpu.__version__)
def command() -> None:
    """Serve this node's shared GPUs to Kubernetes."""


@command.command()
@node_options
@click.option(
    "--kubeconfig",
    type=click.Path(path_type=Path),
    help="Identity at the API server, such as /etc/kubernetes/kubelet.conf; default: the service account of this pod.",
)
@reserve_option
@click.option(
    "--memory-step", type=POSITIVE_SIZE, default="256MiB", show_default=True, help="Requests are multiples of it."
)
@click.option(
    "--memory-default",
    type=POSITIVE_SIZE,
    default="1GiB",
    show_default=True,
    help="What a request without a size gets.",
)
@click.option("--shares", type=click.IntRange(1, 1000), default=64, show_default=True, help="Claims on a card at most.")
@click.option(
    "--resync",
    type=entry_point.Seconds(0.1, 86400),
    default=30.0,
    show_default=True,
    help="Seconds between comparisons of all claims.",
)
def dra(
    config: NodeConfig,
    kubeconfig: Path | None,
    reserve: int,
    memory_step: int,
    memory_default: int,
    shares: int,
    resync: float,
) -> None:
    """Run the DRA driver: claims with memory and cores (Kubernetes 1.34 or newer).

    Needs the feature gate DRAConsumableCapacity, which is on from 1.36.
    """
    try:
        from qgpu.k8s import dra_driver
        from qgpu.k8s.resource_slices import SharingOptions
    except ImportError as error:
        raise _missing(error) from error
    default = -(-memory_default // memory_step) * memory_step
    dra_driver.run(config, kubeconfig, SharingOptions(reserve, memory_step, default, shares), resync)


@command.command()
@node_options
@reserve_option
@click.option(
    "--alias",
    "aliases",
    multiple=True,
    type=click.Choice(["qgpu", "hami", "vcuda"]),
    help="Serve the resource names of another system too; may be given several times.",
)
@click.option(
    "--memory-factor",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="MiB in a unit of HAMi's nvidia.com/gpumem.",
)
@click.option(
    "--patience",
    type=entry_point.Seconds(0.1, 86400),
    default=60.0,
    show_default=True,
    help="Seconds for which the kubelet must not list units before they count as free.",
)
def device_plugin(
    config: NodeConfig, reserve: int, aliases: tuple[str, ...], memory_factor: int, patience: float
) -> None:
    """Run the device plugin: qgpu.io/cores in per cent, for clusters without consumable capacity."""
    try:
        from qgpu.k8s import resources
        from qgpu.k8s.device_plugin import run
    except ImportError as error:
        raise _missing(error) from error
    served = resources.served(map(resources.Alias, aliases), memory_factor)
    run(config, served, reserve, patience)


def _missing(error: ImportError) -> NotSupportedError:
    return NotSupportedError(f"{error.name} is not installed; install qgpu with its extra: pip install 'qgpu[k8s]'")


def main() -> None:
    """Run the command line. If it fails, end with one line on stderr and a documented exit code."""
    faulthandler.enable()  # gRPC is native code
    entry_point.run("qgpu-k8s", command)


if __name__ == "__main__":
    main()
