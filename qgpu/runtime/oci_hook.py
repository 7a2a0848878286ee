"""The createRuntime hook: announces a container to the daemon before its process starts, or stops the start.

OCI runtimes run it as ``python3 -I -S oci_hook.py SOCKET``, with the container's state on stdin. It decides nothing:
the daemon makes the container a pod, or refuses with one line and the container does not start. While the daemon or the
data plane is being replaced, the hook asks again; asking twice binds a container only once. Without an answer by the
deadline, the container does not start. The hook imports none of qgpu's modules and few others, because every start of a
container waits for it. Its messages have the format of ``qgpu.ipc.wire``.
"""

import json
import os
import socket
import struct
import sys
import syslog
import time

#: Seconds that all requests together wait for a daemon and a data plane, and the pause between two tries.
TIMEOUT_S, RETRY_S = 10, 0.05
#: The code of a refusal because the data plane is gone (qgpu.errors.ExitCode.GPU_LOST); its successor may accept.
_GONE = 15
#: The prefixes of names of prepared devices and of groups (qgpu.runtime.oci_container).
_NAMED = "qgpu.io/claim=", "qgpu.io/group="
#: The prefix of crun's annotations that write the hooks' output to a file of the host.
_OUTPUT = "run.oci.hooks."
#: How long a container waits for room in its GPU's memory, and how often it asks. A kubelet gives it two minutes.
_ROOM_TIMEOUT_S, _POLL_S = 100, 0.2
#: The most characters of a refusal.
_LONGEST = 2000


def main() -> int:
    """Return 0 if the container is a pod with its grant, else 1."""
    path = sys.argv[1]
    try:
        state = json.load(sys.stdin)
        with open(os.path.join(state["bundle"], "config.json")) as file:
            config = json.load(file)
        linux = config.get("linux", {})
        request = {
            "op": "container.bind",
            "id": state["id"],
            "pid": state["pid"],
            "annotations": config.get("annotations") or {},
            "env": config.get("process", {}).get("env") or [],
            "devices": [
                (node["major"], node["minor"]) for node in linux.get("devices") or [] if node.get("type") in "cu"
            ],
            "rules": (linux.get("resources") or {}).get("devices") or [],
            "seccomp": linux.get("seccomp"),
            # the container's own namespaces, and its mounts: file system and source of each
            "namespaces": [each.get("type") for each in linux.get("namespaces") or [] if not each.get("path")],
            "mounts": [
                (each.get("type") or "", os.path.realpath(os.path.join(state["bundle"], each.get("source") or "")))
                for each in config.get("mounts") or []
            ],
            # so runc calls one that CRIU restores; a new one is "creating" (crun: "created")
            "restored": state.get("status") == "stopped",
            # the prepared devices and groups that the runtime gave it, by all of our hooks' arguments
            "prepared": [
                word
                for entry in (config.get("hooks") or {}).get("createRuntime") or []
                for word in entry.get("args") or []
                if word.startswith(_NAMED)
            ],
        }
        to_stderr = not any(name.startswith(_OUTPUT) for name in request["annotations"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return refuse(f"the runtime's description of the container cannot be read: {error!r}", to_stderr=False)
    try:
        answer = answered(path, request)
        name, end_s = answer.get("name"), time.monotonic() + _ROOM_TIMEOUT_S
        while answer.get("waits"):  # the daemon is freeing memory on the GPU for this container
            if time.monotonic() > end_s:
                return refuse(
                    f"pod {name}: no room yet, it waits for {answer['waits']}; start it again later", to_stderr
                )
            time.sleep(_POLL_S)
            answer = answered(path, {"op": "pod.waits", "name": name})
    except RefusedError as why:
        return refuse(why, to_stderr)
    return 0


class RefusedError(Exception):
    """Why the container may not start."""


def answered(path: str, request: dict[str, object]) -> dict[str, object]:
    """Make a request, again while daemon or data plane are being replaced. Raises RefusedError, with why."""
    deadline, why = time.monotonic() + TIMEOUT_S, None
    while True:
        try:
            answer = ask(path, request, deadline)
            if answer.get("ok"):
                return answer
            why = answer.get("error")
            if answer.get("code") != _GONE:
                raise RefusedError(why)
        except (OSError, ValueError) as error:
            if why is None or not isinstance(error, TimeoutError):  # at the deadline, keep the last answer
                why = f"{path}: {error}; a container gets a GPU only with its grant, and qgpud does not answer"
        if time.monotonic() + RETRY_S > deadline:
            raise RefusedError(f"{why} (tried for {TIMEOUT_S} s)")
        time.sleep(RETRY_S)


def ask(path: str, request: dict[str, object], deadline: float) -> dict[str, object]:
    """Make one request, until a time on CLOCK_MONOTONIC. Raises OSError, ValueError."""
    body = json.dumps(request).encode()
    with socket.socket(socket.AF_UNIX) as sock:
        whole_s, rest_s = divmod(max(deadline - time.monotonic(), 0), 1)
        # The socket must block: with Python's timeout, a full queue fails connect() at once (unix_stream_connect).
        timeval = struct.pack("@ll", int(whole_s), int(rest_s * 1e6) or 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)
        try:
            sock.connect(path)
        except BlockingIOError:
            raise TimeoutError("timed out") from None
        wait_until(sock, deadline)
        sock.sendall(struct.pack("<I", len(body)) + body)
        (length,) = struct.unpack("<I", receive(sock, 4, deadline))
        answer = json.loads(receive(sock, length, deadline))
    return answer if isinstance(answer, dict) else {}


def wait_until(sock: socket.socket, deadline: float) -> None:
    """Bound the next call on a socket. Raises TimeoutError."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("timed out")
    sock.settimeout(left)


def receive(sock: socket.socket, size: int, deadline: float) -> bytes:
    """Return exactly ``size`` bytes. Raises OSError."""
    data = b""
    while len(data) < size:
        wait_until(sock, deadline)
        part = sock.recv(size - len(data))
        if not part:
            raise ConnectionError("it hung up")
        data += part
    return data


def refuse(why: object, to_stderr: bool) -> int:
    """Report why the container does not start: in the system log, and on stderr, which crun throws away.

    The reason may quote text of an image, of any length. So only its beginning is reported, in printable characters. If
    an image can have chosen the file behind stderr, which crun opens as root, nothing is written there.
    """
    line = "".join(each if each.isprintable() else "?" for each in str(why)[:_LONGEST])
    if to_stderr:
        print(f"qgpu: {line}", file=sys.stderr)
    syslog.openlog("qgpu", 0, syslog.LOG_DAEMON)
    syslog.syslog(syslog.LOG_ERR, line)
    return 1


if __name__ == "__main__":
    sys.exit(main())
