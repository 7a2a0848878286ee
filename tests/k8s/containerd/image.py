"""The one image of these tests: busybox that sleeps, as an OCI archive for ``ctr images import``."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
from pathlib import Path

from tests.runtime import oci

NAME = "localhost/qgpu-test:1"
_COMMAND = ("/bin/sleep", "1000000")


def make(path: Path) -> Path:
    """Write the archive and return its path."""
    root = oci.rootfs(path.with_suffix(".rootfs"))
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w") as layer:
        layer.add(root, arcname=".")
    blobs: dict[str, bytes] = {}

    def blob(kind: str, data: bytes) -> dict[str, object]:
        digest = hashlib.sha256(data).hexdigest()
        blobs[digest] = data
        return {"mediaType": f"application/vnd.oci.image.{kind}", "digest": f"sha256:{digest}", "size": len(data)}

    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Entrypoint": _COMMAND, "Env": ["PATH=/bin"]},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(plain.getvalue()).hexdigest()}"]},
    }
    manifest = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": blob("config.v1+json", json.dumps(config).encode()),
        "layers": [blob("layer.v1.tar+gzip", gzip.compress(plain.getvalue(), compresslevel=1))],
    }
    top = blob("manifest.v1+json", json.dumps(manifest).encode())
    index = {
        "schemaVersion": 2,
        "manifests": [
            top | {"annotations": {"io.containerd.image.name": NAME, "org.opencontainers.image.ref.name": "1"}}
        ],
    }
    files = {f"blobs/sha256/{digest}": data for digest, data in blobs.items()} | {
        "index.json": json.dumps(index).encode(),
        "oci-layout": b'{"imageLayoutVersion": "1.0.0"}',
    }
    with tarfile.open(path, "w") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return path
