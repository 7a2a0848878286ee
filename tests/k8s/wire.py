"""The kubelet's interfaces as protoc compiles them from ``protos``: the other side of what ``qgpu.k8s`` speaks."""

from __future__ import annotations

import importlib
import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc

_PROTOS = Path(__file__).with_name("protos")
NAMES = tuple(sorted(path.stem for path in _PROTOS.glob("*.proto")))
with tempfile.TemporaryDirectory(prefix="qgpu-protos.") as _out:
    _failed = protoc.main(
        [
            "protoc",
            f"-I{_PROTOS}",
            f"--python_out={_out}",
            f"--grpc_python_out={_out}",
            *(f"{name}.proto" for name in NAMES),
        ]
    )
    assert not _failed
    sys.path.insert(0, _out)
    try:
        #: Messages and stubs by interface.
        MESSAGES = {name: importlib.import_module(f"{name}_pb2") for name in NAMES}
        STUBS = {name: importlib.import_module(f"{name}_pb2_grpc") for name in NAMES}
    finally:
        sys.path.remove(_out)
