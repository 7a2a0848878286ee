"""``qgpuctl run``: start any command as a pod and end with its exit code.

The connection that made the pod stays open: the pod cannot be retired while it is. If anything fails before the
command starts, the command does not start: a pod runs with its grant or not at all.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, NoReturn

import click
from click.core import ParameterSource

from qgpu.cli import completion
from qgpu.cli.context import Context, first_gpu
from qgpu.cli.grant_options import class_option, permission_options, permissions
from qgpu.cli.params import DURATION, FIRST_PGPU, MEMORY, PGPU
from qgpu.errors import QgpuError, TimedOutError
from qgpu.groups.group_files import GroupFiles, check_not_claims
from qgpu.groups.mps_server import WITH_MPS
from qgpu.ipc.control_socket import Client
from qgpu.runtime import launch

_FORWARDED = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2}
#: The largest si_code of a signal sent by a process; the kernel's own are larger (sigaction(2)).
_BY_A_PROCESS = 0
#: Options whose variables have other names.
_WRITTEN = {
    "gpus": "gpu",
    "pod_class": "class",
    "latency_target": "latency-target",
    "profiling": "allow-profiling",
    "graphics": "allow-graphics",
}
#: How often a pod that waits for memory asks whether it may begin.
_POLL_S = 0.2
_NOT_EXECUTABLE, _NO_SUCH_COMMAND, _BY_SIGNAL = 126, 127, 128


@click.command(context_settings={"allow_interspersed_args": False})
@click.option(
    "--gpu",
    "gpus",
    type=PGPU,
    multiple=True,
    show_default=FIRST_PGPU,
    shell_complete=completion.gpus,
    help="The pGPU to run on, by number or UUID; may be repeated.",
)
@click.option("--name", help="The pod's name. Default: a generated one.")
@click.option(
    "--group",
    shell_complete=completion.groups,
    help="Run in this share group, under its grant; see 'qgpuctl group'.",
)
@click.option("--sm", type=int, help="With --group: the part of the SMs it may use, in per cent.")
@click.option("--cores", type=int, help="Quota in per cent of the pGPU.")
@click.option("--memory", type=MEMORY, help="Memory limit such as 16GiB (16G and 16GB are the same).")
@class_option
@click.option("--latency-target", type=DURATION, help="What sharing may add to an online pod's p99, such as 2ms.")
@permission_options
@click.argument("command", metavar="-- CMD...", nargs=-1, required=True, type=click.UNPROCESSED)
@click.pass_context
def run(
    click_context: click.Context,
    gpus: tuple[int, ...],
    name: str | None,
    group: str | None,
    sm: int | None,
    cores: int | None,
    memory: int | None,
    pod_class: str,
    latency_target: int | None,
    profiling: bool,
    graphics: bool,
    command: tuple[str, ...],
) -> NoReturn:
    """Run a command as a pod and end with its exit code."""
    context: Context = click_context.obj
    if name == "":
        raise click.UsageError("--name is empty: leave it out for a generated name")
    if command[0] and not _may_exist(command[0]):
        click.echo(f"qgpuctl: {command[0]}: {os.strerror(errno.ENOENT)}", err=True)
        sys.exit(_NO_SUCH_COMMAND)
    if group is not None:
        _check_member_options(click_context)
        sys.exit(_run_in_group(context, group, sm, memory, command))
    if sm is not None:
        raise click.UsageError("--sm is a member's part of a group: give --group, too")
    grant = {"class": pod_class, "cores": cores, "memory": memory, "latency_target_ns": latency_target}
    grant |= permissions(profiling=profiling, graphics=graphics)
    # Block signals until the child exists; otherwise they would end only us. Ctrl-C may come: it ends both.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED - {signal.SIGINT})
    with context.connect() as client:
        gpus = tuple(dict.fromkeys(gpus)) or (first_gpu(client),)
        pod = client.call("pod.create", name=name, grants={str(gpu): grant for gpu in gpus})
        _wait_for_room(client, pod)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, signal.SIGINT})
        code = _run_child(context, gpus, pod, command, {}, before)
        with suppress(QgpuError):  # a pod with processes left lives on
            client.call("pod.remove", name=pod["name"])
    sys.exit(code)


def _may_exist(program: str) -> bool:
    """Tell whether exec may find a program, by its path or in PATH; what it may not look at may exist."""
    for directory in [""] if "/" in program else os.get_exec_path():
        try:
            os.stat(os.path.join(directory, program))
        except FileNotFoundError:
            continue
        except (OSError, ValueError):
            return True
        return True
    return False


def _wait_for_room(client: Client, pod: dict[str, Any]) -> None:
    """Wait until a pod may begin, where memory is overcommitted. A signal ends us, and with us the pod."""
    if not (waits := pod["waits"]):
        return
    click.echo(f"pod {pod['name']} waits for {waits}", err=True)
    while client.call("pod.waits", name=pod["name"])["waits"]:
        if (received := signal.sigtimedwait(_FORWARDED - {signal.SIGINT}, _POLL_S)) is not None:
            sys.exit(_BY_SIGNAL + received.si_signo)


def _check_member_options(click_context: click.Context) -> None:
    """Refuse options that the group's own grant decides. Raises click.UsageError."""
    for option in ("gpus", "name", "cores", "pod_class", "latency_target", "profiling", "graphics"):
        if click_context.get_parameter_source(option) is ParameterSource.COMMANDLINE:
            raise click.UsageError(f"--{_WRITTEN.get(option, option)} is the group's: leave it out with --group")


def _run_in_group(context: Context, name: str, sm: int | None, memory: int | None, command: tuple[str, ...]) -> int:
    """Run a command in a group's pod, as a client of its MPS server; return the exit code. Raises a QgpuError."""
    files = GroupFiles(context.runtime_dir, name)
    files.need_keeper()
    if not files.is_server(command):
        check_not_claims(context.ask("grant.list")["grants"], name, "its members are that claim's containers")
    uuids = {gpu["index"]: gpu["uuid"] for gpu in context.ask("gpu.list")["gpus"]}
    gpus = tuple(grant["gpu"] for grant in context.pod(name)["grants"])
    pod = {"plane": context.ask("status")["plane"], "name": name, "gpus": [uuids[gpu] for gpu in gpus]}
    part = files.part
    variables = files.server.environment(part.sm if sm is None else sm, part.memory if memory is None else memory)
    if pod["plane"] in WITH_MPS and not files.is_server(command) and not files.server.wait(context.timeout_s):
        raise TimedOutError(f"group {name}: its MPS control daemon takes no clients; see {files.directory}/log")
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*_FORWARDED, signal.SIGCHLD})
    return _run_child(context, gpus, pod, command, variables, before)


def _run_child(
    context: Context,
    gpus: tuple[int, ...],
    pod: dict[str, Any],
    command: tuple[str, ...],
    more: Mapping[str, str],
    blocked: Iterable[int],
) -> int:
    """Run the pod's command in a child, with ``more`` variables and these signals blocked; return its exit code."""
    if child := os.fork():
        return _wait(child)
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    try:
        variables = launch.environment(pod["plane"], pod["name"], pod["gpus"], context.runtime_dir.absolute())
        variables |= more
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
