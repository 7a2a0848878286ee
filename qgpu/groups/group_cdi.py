"""The CDI file of a group: how a container runtime makes a container a member.

The device mounts the directory with MPS's sockets at the same path, sets an MPS client's variables, and adds our hook
with the group's name among its arguments. Only the runtime writes hooks into a container's configuration, so neither an
image nor a container's own environment makes it a member.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qgpu.groups.group_files import GroupFiles
from qgpu.groups.mps_server import SHARED_MEMORY, MpsServer
from qgpu.ipc.codec import pgpu_from_json
from qgpu.ipc.control_socket import Client
from qgpu.model.plane_api import Pgpu
from qgpu.model.prepared_grant import PreparedGrant
from qgpu.paths import root_socket_path
from qgpu.runtime import cdi
from qgpu.runtime.oci_container import GROUP_KIND

#: Read-only: clients can still connect to the sockets.
_MOUNT = ["ro", "nosuid", "nodev", "noexec", "bind"]
_SHARED = ["rw", "nosuid", "nodev", "noexec", "bind"]


def place(client: Client, files: GroupFiles) -> Path | None:
    """Return the path of a group's CDI file, beside the daemon's; None if the daemon writes none. Raises QgpuError."""
    directory = client.call("status")["cdi"]
    return None if directory is None else Path(directory) / f"qgpu-group-{files.name}.json"


def offer(client: Client, files: GroupFiles) -> None:
    """Write a group's CDI file, if the daemon writes any. Raises a QgpuError."""
    if (path := place(client, files)) is None:
        return
    pods = client.call("pod.list")["pods"]
    indexes = {grant["gpu"] for pod in pods if pod["name"] == files.name for grant in pod["grants"]}
    listed = client.call("gpu.list")["gpus"]
    cards = [pgpu_from_json(gpu) for gpu in listed if gpu["index"] in indexes]
    cdi.write(specification(files, cards), path.parent, path.name)


def member_edits(runtime_dir: Path, grant: PreparedGrant) -> dict[str, Any]:
    """Return what makes a container with a claim's device a client of the claim's group; nothing without a group.

    The container gets the members' shared memory in place of its own, so it needs no host IPC namespace.
    """
    if grant.part is None:
        return {}
    server = GroupFiles(runtime_dir.absolute(), grant.group).server
    memory = {"hostPath": str(server.memory), "containerPath": str(SHARED_MEMORY), "options": _SHARED}
    variables = server.environment(grant.part.sm, grant.part.memory)
    return {"env": [f"{key}={value}" for key, value in variables.items()], "mounts": [_pipe(server), memory]}


def specification(files: GroupFiles, cards: Sequence[Pgpu]) -> dict[str, Any]:
    """Return the CDI specification of a group. Raises NotSupportedError if the driver's libraries cannot be found."""
    card, part = cdi.card_edits(cards), files.part
    variables = files.server.environment(part.sm, part.memory)
    edits = card | {
        "env": [*card["env"], *(f"{key}={value}" for key, value in variables.items())],
        "mounts": [_pipe(files.server)],
        "hooks": [cdi.hook_entry(root_socket_path(files.runtime_dir), f"{GROUP_KIND}={files.name}")],
    }
    return {
        "cdiVersion": cdi.VERSION,
        "kind": GROUP_KIND,
        "devices": [{"name": files.name, "containerEdits": edits}],
        "containerEdits": cdi.common_edits(cards),
    }


def _pipe(server: MpsServer) -> dict[str, Any]:
    return {"hostPath": str(server.pipe), "containerPath": str(server.pipe), "options": _MOUNT}
