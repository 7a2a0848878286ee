"""``qgpuctl web``: the local page, for as long as the command runs."""

from __future__ import annotations

import signal

import click

from qgpu.cli.context import Context, pass_context
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
@click.option("--allow-changes", is_flag=True, help="Let who has the printed address switch policies.")
@pass_context
def web(context: Context, listen: str, allow_changes: bool) -> None:
    """Serve a page with live shares and a timeline to browsers on this host; Ctrl-C ends it.

    It only shows, unless told otherwise; it can do no more than whoever starts it.
    """
    context.connect().close()  # a daemon that is not there is told here and not in the page
    site = Site(parse_address(listen), context.connect, changes=allow_changes)
    stop = Shutdown(signal.SIGINT, signal.SIGTERM)
    try:
        click.echo(site.url)
        stop.wait()
    finally:
        site.close()
