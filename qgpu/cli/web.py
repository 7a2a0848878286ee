"""``qgpuctl web``: serves the local page while the command runs."""

from __future__ import annotations

import signal
from functools import partial

import click

from qgpu.cli.context import Context, pass_context
from qgpu.ipc.control_socket import Client
from qgpu.ipc.http_server import parse_address
from qgpu.linux.shutdown import Shutdown
from qgpu.web.site import Site


@click.command()
@click.option(
    "--listen",
    default="127.0.0.1:9836",
    show_default=True,
    help="A loopback address and a port, or unix:/path.",
)
@click.option("--allow-changes", is_flag=True, help="Allow policy changes with the token in the printed address.")
@pass_context
def web(context: Context, listen: str, allow_changes: bool) -> None:
    """Serve a page with live shares and a timeline to browsers on this host. Ctrl-C ends it.

    The page is read-only without --allow-changes. It has the permissions of the user who starts the command.
    """
    address = parse_address(listen)
    context.connect().close()  # fail here, not in the page, if there is no daemon
    # While the page is served, a daemon that is gone is said at once.
    connect = partial(Client, context.runtime_dir, context.timeout_s)
    site = Site(address, connect, changes=allow_changes)
    stop = Shutdown(signal.SIGINT, signal.SIGTERM)
    try:
        click.echo(site.url)
        stop.wait()
    finally:
        site.close()
