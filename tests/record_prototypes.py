"""Compare the functions that kmod/ hooks across the versions of NVIDIA's open modules, and list those that agree.

    record_prototypes.py SOURCE... [--write]

SOURCE is a git clone of open-gpu-kernel-modules with its tags, or the folder of a distribution's package of them. A
version is listed if every function has the prototype, and every parameter struct and answer the beginning, that the
module's handlers read. The list goes to kmod/driver_versions.h, where versions that no SOURCE holds stay as they are;
the module touches no version that is not listed.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

HEADER = Path(__file__).resolve().parents[1] / "kmod" / "driver_versions.h"
OLDEST = 535
#: By file of the driver: what it must hold, once comments are gone and every run of blanks is one. Names of arguments
#: are their own.
NEEDED = {
    "kernel-open/common/inc/nv.h": [
        r"NV_STATUS NV_API_CALL rm_ioctl \(nvidia_stack_t \*, nv_state_t \*, nv_file_private_t \*, NvU32, void \*, "
        r"NvU32\);",
        r"nv_file_private_t\* ?NV_API_CALL nv_get_file_private ?\(NvS32, NvBool, void \*\*\);",
    ],
    "kernel-open/common/inc/os-interface.h": [
        r"NV_STATUS NV_API_CALL os_memcpy_from_user \(void \*, const void \*, NvU32\);",
        r"NV_STATUS NV_API_CALL os_memcpy_to_user \(void \*, const void \*, NvU32\);",
    ],
    "kernel-open/nvidia-uvm/uvm.c": [
        r"static int uvm_mmap_entry\(struct file \*\w+, struct vm_area_struct \*\w+\)",
        r"static void uvm_vm_close_managed_entry\(struct vm_area_struct \*\w+\)",
        r"static int uvm_release_entry\(struct inode \*\w+, struct file \*\w+\)",
        r"\.mmap = uvm_mmap_entry,",
    ],
    "kernel-open/nvidia-uvm/uvm_va_space.h": [
        r"NV_STATUS uvm_va_space_create\(struct address_space \*\w+, uvm_va_space_t \*\*\w+, NvU64 \w+\);"
    ],
    "kernel-open/nvidia-uvm/uvm_api.h": [
        rf"NV_STATUS uvm_api_{name}\(UVM_{name.upper()}_PARAMS \*\w+, struct file \*\w+\);"
        for name in (
            "map_dynamic_parallelism_region",
            "map_external_sparse",
            "alloc_semaphore_pool",
            "map_external_allocation",
        )
    ],
    "kernel-open/nvidia-uvm/uvm_ioctl.h": [
        rf"typedef struct \{{ NvU64 base NV_ALIGN_BYTES\(8\);[^{{}}]*NvU64 length NV_ALIGN_BYTES\(8\);[^{{}}]*"
        rf"\}} UVM_{name}_PARAMS;"
        for name in (
            "MAP_DYNAMIC_PARALLELISM_REGION",
            "MAP_EXTERNAL_SPARSE",
            "ALLOC_SEMAPHORE_POOL",
            "MAP_EXTERNAL_ALLOCATION",
        )
    ],
    "kernel-open/common/inc/nv_uvm_interface.h": [
        r"NV_STATUS nvUvmInterfaceDupAddressSpace\(uvmGpuDeviceHandle \w+, NvHandle \w+, NvHandle \w+, "
        r"uvmGpuAddressSpaceHandle \*\w+, UvmGpuAddressSpaceInfo \*\w+\);",
        r"void nvUvmInterfaceAddressSpaceDestroy\(uvmGpuAddressSpaceHandle \w+\);",
        r"NV_STATUS nvUvmInterfaceRetainChannel\(uvmGpuAddressSpaceHandle \w+, NvHandle \w+, NvHandle \w+, "
        r"void \*\*\w+, UvmGpuChannelInstanceInfo \*\w+\);",
        r"void nvUvmInterfaceReleaseChannel\(void \*\w+\);",
        r"NV_STATUS nvUvmInterfaceDupMemory\(uvmGpuDeviceHandle \w+, NvHandle \w+, NvHandle \w+, NvHandle \*\w+, "
        r"UvmGpuMemoryInfo \*\w+\);",
        r"NV_STATUS nvUvmInterfaceFreeDupedHandle\(uvmGpuDeviceHandle \w+, NvHandle \w+\);",
    ],
    "kernel-open/common/inc/nv_uvm_types.h": [r"\{ NvU32 kind; NvBool sysmem;[^{}]*\} UvmGpuMemoryInfo;"],
}


def git(repository: str, *arguments: str) -> str:
    command = ["git", "-C", repository, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, errors="replace").stdout


def order(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


def in_source(source: Path) -> dict[str, Callable[[str], str]]:
    """By version: what reads a file of it, by its path in the repository."""
    if (kbuild := source / "Kbuild").exists():
        (version,) = re.findall(r'-DNV_VERSION_STRING=\\"([\d.]+)\\"', kbuild.read_text())
        return {version: lambda path: (source / path.removeprefix("kernel-open/")).read_text(errors="replace")}
    tags = [tag for tag in git(str(source), "tag").split() if re.fullmatch(r"\d{3}(\.\d+){1,2}", tag)]
    return {
        tag: lambda path, tag=tag: git(str(source), "show", f"{tag}:{path}")
        for tag in sorted(tags, key=order)
        if order(tag)[0] >= OLDEST
    }


def lacks(read: Callable[[str], str]) -> list[str]:
    """What a version does not have as the module needs it."""
    found = []
    for path, patterns in NEEDED.items():
        text = " ".join(re.sub(r"/\*.*?\*/|//[^\n]*", " ", read(path), flags=re.DOTALL).split())
        found += [f"{path}: {pattern}" for pattern in patterns if not re.search(pattern, text)]
    return found


def listed(text: str, lacking: Mapping[str, list[str]]) -> list[str]:
    """The versions of a header, with those that lack nothing and without those that do."""
    versions = set(re.findall(r'"([\d.]+)"', text)) - set(lacking)
    return sorted(versions | {version for version, missing in lacking.items() if not missing}, key=order)


def header(versions: list[str]) -> str:
    """The C header that lists them."""
    rows = "".join(f'\t"{version}",\n' for version in versions)
    return f"""\
/* SPDX-License-Identifier: GPL-2.0 */
/*
 * driver_versions.h - the versions of the driver whose sources agree on every function that the module hooks: its
 * prototype, and the beginnings of its parameters and answers. Written by tests/record_prototypes.py; do not edit. Only
 * rm.c reads it.
 */
#ifndef _QGPU_DRIVER_VERSIONS_H
#define _QGPU_DRIVER_VERSIONS_H

static const char *const driver_versions[] = {{
{rows}}};

#endif /* _QGPU_DRIVER_VERSIONS_H */
"""


def main() -> None:
    lacking = {
        version: lacks(read)
        for source in sys.argv[1:]
        if source != "--write"
        for version, read in in_source(Path(source)).items()
    }
    for version, missing in lacking.items():
        if missing:
            print(f"{version}: {'; '.join(missing)}", file=sys.stderr)
    if "--write" in sys.argv:
        HEADER.write_text(header(listed(HEADER.read_text(), lacking)))
    print(f"{sum(not missing for missing in lacking.values())} versions agree")


if __name__ == "__main__":
    main()
