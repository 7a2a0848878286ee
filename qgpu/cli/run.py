"""``qgpuctl run``: start any command as a pod and end with its exit code.

The connection that made the pod stays open: the pod cannot be retired while it is. If anything fails before the
command starts, the command does not start: a pod runs with its grant or not at all.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from typing import Any, NoReturn

import click

from qgpu.cli.context import Context, pass_context
from qgpu.cli.params import DURATION, MEMORY
from qgpu.errors import QgpuError
from qgpu.ipc.control_socket import Client
from qgpu.model import PodClass
from qgpu.runtime import launch

_FORWARDED = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2}
#: The largest si_code of a signal sent by a process; the kernel's own are larger (sigaction(2)).
_BY_A_PROCESS = 0
_NOT_EXECUTABLE, _NO_SUCH_COMMAND, _BY_SIGNAL = 126, 127, 128


@click.command(context_settings={"allow_interspersed_args": False})
@click.option(
    "--gpu",
    "gpus",
    type=int,
    multiple=True,
    default=(0,),
    show_default=True,
    help="The pGPU to run on; may be repeated.",
)
@click.option("--name", help="The pod's name. Default: a generated one.")
@click.option("--cores", type=int, help="Quota in per cent of the pGPU.")
@click.option("--memory", type=MEMORY, help="Memory limit such as 16GiB.")
@click.option(
    "--class",
    "pod_class",
    type=click.Choice([each.value for each in PodClass]),
    default=PodClass.OFFLINE.value,
    show_default=True,
    help="online: latency matters; offline: takes the time that is left.",
)
@click.option("--latency-target", type=DURATION, help="What sharing may add to an online pod's p99, such as 2ms.")
@click.argument("command", metavar="-- CMD...", nargs=-1, required=True, type=click.UNPROCESSED)
@pass_context
def run(
    context: Context,
    gpus: tuple[int, ...],
    name: str | None,
    cores: int | None,
    memory: int | None,
    pod_class: str,
    latency_target: int | None,
    command: tuple[str, ...],
) -> NoReturn:
    """Run a command as a pod and end with its exit code."""
    gpus = tuple(dict.fromkeys(gpus))
    grant = {"class": pod_class, "cores": cores, "memory": memory, "latency_target_ns": latency_target}
    # Block signals until the child exists; otherwise they would end only us. Ctrl-C may come: it ends both.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED - {signal.SIGINT})
    with context.connect() as client:
        pod = client.call("pod.create", name=name, grants={str(gpu): grant for gpu in gpus})
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, signal.SIGINT})
        child = os.fork()
        if child == 0:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            _become(context, gpus, pod, command)
        code = _wait(child)
        with suppress(QgpuError):  # a pod with processes left lives on
            client.call("pod.remove", name=pod["name"])
    sys.exit(code)


def _become(context: Context, gpus: tuple[int, ...], pod: dict[str, Any], command: tuple[str, ...]) -> NoReturn:
    """Turn this process, a newly forked child, into the pod's command."""
    try:
        variables = launch.environment(pod["plane"], pod["name"], pod["gpus"], context.runtime_dir.absolute())
        with Client(context.runtime_dir, context.timeout_s) as own:  # the daemon attaches the process that connects
            fds = launch.enter(pod["plane"])
            own.call("pod.attach", fds, name=pod["name"])
            for fd in fds:
                os.close(fd)
        os.execvpe(command[0], command, os.environ | variables | {"QGPU_GPU": ",".join(map(str, gpus))})  # noqa: S606
    except QgpuError as error:
        _give_up(f"qgpuctl: {error}", error.code)
    except ValueError as error:  # an empty name
        _give_up(f"qgpuctl: {command[0]!r}: no command: {error}", _NO_SUCH_COMMAND)
    except OSError as error:
        code = _NO_SUCH_COMMAND if isinstance(error, FileNotFoundError) else _NOT_EXECUTABLE
        _give_up(f"qgpuctl: {command[0]}: {error.strerror}", code)


def _give_up(line: str, code: int) -> NoReturn:
    """End the child without running the parent's exit handlers."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
    os._exit(code)


def _wait(child: int) -> int:
    """Forward signals until the child has ended; return its exit code as a shell would.

    Signals from the kernel (Ctrl-C at the terminal) reach the child anyway, because it is in our process group. They
    are not forwarded; otherwise it would get them twice.
    """
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            break
        received = signal.sigwaitinfo({signal.SIGCHLD, *_FORWARDED})
        if received.si_signo != signal.SIGCHLD and received.si_code <= _BY_A_PROCESS:
            with suppress(ProcessLookupError):
                os.kill(child, received.si_signo)
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else _BY_SIGNAL - code
