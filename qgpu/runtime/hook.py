"""The createRuntime hook: announces a container to the daemon before its process starts, or keeps it from starting.

OCI runtimes run it as ``python3 -I -S hook.py SOCKET``, with the container's state on stdin. It decides nothing: the
daemon makes the container a pod, or refuses with one line and the container does not start. If the daemon does not
answer, the container does not start either. The hook imports nothing of ours and little else, because every start of a
container waits for it. Its messages are those of ``qgpu.ipc.wire``.
"""

import json
import os
import socket
import struct
import sys
import syslog

_TIMEOUT_S = 10
#: How the name of a prepared device begins (qgpu.runtime.claim_cdi).
_PREPARED = "qgpu.io/claim="


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
            # the prepared devices that the runtime gave it, by all of our hooks' arguments
            "prepared": [
                word
                for entry in (config.get("hooks") or {}).get("createRuntime") or []
                for word in entry.get("args") or []
                if word.startswith(_PREPARED)
            ],
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return refuse(f"the runtime's description of the container cannot be read: {error!r}")
    try:
        answer = ask(path, request)
    except (OSError, ValueError) as error:
        return refuse(f"{path}: {error}; a container gets a GPU only with its grant, and qgpud does not answer")
    return 0 if answer.get("ok") else refuse(answer.get("error"))


def ask(path: str, request: dict[str, object]) -> dict[str, object]:
    """Make one request. Raises OSError, ValueError."""
    body = json.dumps(request).encode()
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(_TIMEOUT_S)
        sock.connect(path)
        sock.sendall(struct.pack("<I", len(body)) + body)
        (length,) = struct.unpack("<I", receive(sock, 4))
        answer = json.loads(receive(sock, length))
    return answer if isinstance(answer, dict) else {}


def receive(sock: socket.socket, size: int) -> bytes:
    """Return exactly ``size`` bytes. Raises OSError."""
    data = b""
    while len(data) < size:
        part = sock.recv(size - len(data))
        if not part:
            raise ConnectionError("it hung up")
        data += part
    return data


def refuse(why: object) -> int:
    """Report why the container does not start: on stderr, and in the system log because crun hides hooks' output."""
    print(f"qgpu: {why}", file=sys.stderr)
    syslog.openlog("qgpu", 0, syslog.LOG_DAEMON)
    syslog.syslog(syslog.LOG_ERR, str(why))
    return 1


if __name__ == "__main__":
    sys.exit(main())
