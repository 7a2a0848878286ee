"""The CDI files of prepared grants, one for each claim: how a container runtime gives a prepared device to a container.

A prepared device adds our hook, with the device's name among its arguments. Only the runtime writes hooks into a
container's configuration, so an image or a pod cannot name a device that it was not given. The environment variable
that the device also sets is for programs to read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from qgpu.errors import PermissionDeniedError
from qgpu.linux import atomic_file
from qgpu.model.plane_api import Pgpu
from qgpu.model.prepared_grant import PreparedGrant
from qgpu.runtime import cdi
from qgpu.runtime.oci_container import CLAIM_VARIABLE
from qgpu.runtime.oci_container import PREPARED_KIND as KIND

#: The beginning and end of the files' names; the claim's UID is between them.
_PREFIX, _SUFFIX = "qgpu-claim-", ".json"


def qualified(name: str) -> str:
    """Return the name by which runtimes know a prepared device."""
    return f"{KIND}={name}"


def specification(
    grant: PreparedGrant, cards: Mapping[str, Pgpu], socket: Path, common: Any, more: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the CDI specification of one claim.

    ``cards`` are this host's by UUID. A device whose card is gone has no device node; its hook then refuses the
    container. ``common`` is what every container with a card needs (``cdi.common_edits``); ``more`` has the variables
    and mounts that every container of this claim needs besides.
    """
    return {
        "cdiVersion": cdi.VERSION,
        "kind": KIND,
        "devices": [
            {"name": device.name, "containerEdits": _edits(device.name, cards.get(device.gpu), socket, more)}
            for device in grant.devices
        ],
        "containerEdits": common,
    }


def _edits(name: str, card: Pgpu | None, socket: Path, more: Mapping[str, Any]) -> dict[str, Any]:
    base = cdi.card_edits([card] if card is not None else [])
    marker = f"{CLAIM_VARIABLE}{re.sub(r'[^A-Za-z0-9]', '_', name)}={name}"
    env = [*base["env"], marker, *more.get("env", ())]
    return base | dict(more) | {"env": env, "hooks": [cdi.hook_entry(socket, qualified(name))]}


class ClaimCdiFiles:
    """Keeps the CDI files of all prepared grants in a directory, and removes those of other claims."""

    def __init__(
        self,
        pgpus: Iterable[Pgpu],
        socket: Path,
        directory: Path,
        more: Callable[[PreparedGrant], Mapping[str, Any]] = lambda _: {},
    ) -> None:
        """``more`` returns what a claim's containers need beyond their card."""
        self._more = more
        self._cards = {pgpu.uuid: pgpu for pgpu in pgpus}
        self._socket, self.directory = socket, directory
        self._driver: object = None
        self._common: dict[str, Any] = {}
        #: By UID: the data from which a claim's file was last written, and the file's stamp then.
        self._written: dict[str, tuple[object, ...]] = {}

    def look(self) -> None:
        """Find the driver's files again if they may have changed. It may take long. Raises NotSupportedError."""
        if (driver := cdi.driver_stamp()) != self._driver:
            self._common, self._driver = cdi.common_edits(self._cards.values()), driver

    def refresh(self, grants: Mapping[str, PreparedGrant]) -> None:
        """Write missing and outdated files, and remove files of no grant; ``grants`` are by UID.

        Call ``look`` first. Raises PermissionDeniedError.
        """
        with self._errors():
            for path in self._ours():
                if path.name.removeprefix(_PREFIX).removesuffix(_SUFFIX) not in grants:
                    path.unlink(missing_ok=True)
            self._written = {uid: entry for uid, entry in self._written.items() if uid in grants}
            for grant in grants.values():
                self._write(grant)

    def write(self, grant: PreparedGrant) -> None:
        """Write one claim's file if it is missing or outdated. Call ``look`` first. Raises PermissionDeniedError."""
        with self._errors():
            self._write(grant)

    def _write(self, grant: PreparedGrant) -> None:
        path = self.directory / f"{_PREFIX}{grant.uid}{_SUFFIX}"
        if self._written.get(grant.uid) == (grant.devices, grant.part, self._driver, cdi.stamp(path)):
            return
        content = specification(grant, self._cards, self._socket, self._common, self._more(grant))
        self.directory.mkdir(mode=0o755, parents=True, exist_ok=True)
        atomic_file.replace(path, json.dumps(content, indent=2) + "\n", 0o644)
        self._written[grant.uid] = grant.devices, grant.part, self._driver, cdi.stamp(path)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise PermissionDeniedError(f"{self.directory}: {error.strerror}; choose another directory") from error

    def _ours(self) -> list[Path]:
        """List our files, and temporary files of a daemon that was killed while it wrote. Raises OSError."""
        found = self.directory.glob(f"{_PREFIX}*{_SUFFIX}"), self.directory.glob(f".{_PREFIX}*{_SUFFIX}.*")
        return [path for paths in found for path in paths]
