"""``qgpuctl cdi``: the files that container runtimes read: the CDI file, and the seccomp plane's profile."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from qgpu.cli.context import Context, pass_context
from qgpu.errors import InvalidValueError
from qgpu.ipc.codec import pgpu_from_json
from qgpu.paths import root_socket_path
from qgpu.runtime import cdi as specification
from qgpu.runtime import seccomp_profile


@click.group()
def cdi() -> None:
    """Files for container runtimes: CDI specification and seccomp profile."""


@cdi.command()
@pass_context
def show(context: Context) -> None:
    """Print the CDI file for this host without writing it."""
    click.echo(json.dumps(_specification(context), indent=2))


@cdi.command()
@click.option(
    "--dir",
    "directory",
    type=click.Path(path_type=Path),
    default=specification.DIRECTORY,
    show_default=True,
    help="Directory in which runtimes look for CDI files.",
)
@pass_context
def generate(context: Context, directory: Path) -> None:
    """Write the CDI file. A running daemon does this by itself and keeps the file current."""
    click.echo(specification.write(_specification(context), directory))


@cdi.command()
@click.option(
    "--base",
    type=click.Path(path_type=Path),
    default=seccomp_profile.BASE,
    show_default=True,
    help="Base profile: the one that containers use now.",
)
@click.option("--unconfined", is_flag=True, help="No base profile: allow every call that is not the GPU's.")
@pass_context
def profile(context: Context, base: Path, unconfined: bool) -> None:
    """Print the seccomp profile that containers need on plane seccomp."""
    woven = seccomp_profile.UNCONFINED if unconfined else _profile(base)
    listener = seccomp_profile.listener(context.runtime_dir.absolute())
    click.echo(json.dumps(seccomp_profile.profile(woven, listener), indent=2))


def _specification(context: Context) -> dict[str, Any]:
    pgpus = [pgpu_from_json(gpu) for gpu in context.ask("gpu.list")["gpus"]]
    return specification.specification(pgpus, root_socket_path(context.runtime_dir))


def _profile(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except OSError as error:
        raise InvalidValueError(
            f"{path}: {error.strerror}; give --base with your runtime's default profile, or --unconfined"
        ) from error
    except ValueError as error:
        raise InvalidValueError(f"{path}: not JSON: {error}") from error
    if not isinstance(found, dict):
        raise InvalidValueError(f"{path}: not a seccomp profile")
    return found
