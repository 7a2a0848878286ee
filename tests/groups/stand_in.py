"""Stand-ins for NVIDIA's MPS, which needs a GPU, and a keeper that has them on the simulator."""

from __future__ import annotations

import sys
from pathlib import Path

from qgpu.groups import keeper

#: In place of that of NVIDIA's cards: the major of terminals.
MAJOR = 5

#: Has a socket and a server in the pod while it runs with -f, and ends that one when it is told to quit.
STAND_IN = """#!{python}
import os, pathlib, signal, socket, subprocess, sys
pipe = pathlib.Path(os.environ["CUDA_MPS_PIPE_DIRECTORY"])
if sys.argv[1:] == ["-f"]:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(pipe / "control"))
    listener.listen(4096)  # nobody takes the connections
    (pipe / "pid").write_text(str(os.getpid()))
    program = [str(pathlib.Path(sys.argv[0]).with_name("nvidia-cuda-mps-server"))]
    run = [sys.executable, "-m", "qgpu.cli.main", "--runtime-dir", str(pipe.parents[2]), "run"]
    if not pipe.parent.name.startswith("claim-"):  # whose pod has a cgroup even on the simulator
        program = [*run, "--group", pipe.parent.name, "--", *program]
    pathlib.Path("/dev/shm/of-" + pipe.parent.name).touch() if len(program) == 1 else None
    server = subprocess.Popen(program)
    signal.signal(signal.SIGTERM, lambda *_: (server.terminate(), os._exit(0)))
    while True:
        signal.pause()
elif sys.argv[1:] == ["ps"]:
    signal.pause()
elif sys.stdin.read().startswith("quit"):
    os.kill(int((pipe / "pid").read_text()), signal.SIGTERM)
"""
SERVER = "#!{python}\nimport signal\nsignal.pause()\n"


def install(directory: Path) -> Path:
    """Put the stand-ins into a directory, and return the control daemon's."""
    program = directory / "nvidia-cuda-mps-control"
    directory.mkdir()
    for file, content in ((program, STAND_IN), (program.with_name("nvidia-cuda-mps-server"), SERVER)):
        file.write_text(content.format(python=sys.executable))
        file.chmod(0o755)
    return program


#: What runs a keeper that has MPS on the simulator.
KEEPER = sys.executable, "-c", "from tests.groups.stand_in import keep; keep()"


def keep() -> None:
    """Keep a group, as ``python -m qgpu.groups.keeper`` does."""
    keeper.main({"sim"}, MAJOR)
