"""The steps of Slurm's jobs whose tasks have the pods' seccomp filter, noted at their cgroups.

On plane seccomp a job is a pod, but a step that was given no GPU passes without a filter, in the job's cgroup all the
same. So a device file of the job belongs to the steps noted here, and not to all of the job.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable

from qgpu.errors import RefusedError
from qgpu.linux import cgroup

#: The key of the notes at the cgroups of a job and of its steps.
_FILTERED = "filtered"
#: The most steps of a job at a time, and of all jobs. The program in the kernel has a map of 8192 cgroups
#: (``bpf/device_files.bpf.c``), of which 1024 are left to other pods. So a job has at most half of what others leave.
MOST_STEPS, MOST_PLACES = 512, 7168


def note(job: str, step: str, others: Iterable[str], *, new: bool) -> bool:
    """Note a step, before its task may open a device, and tell whether it was not noted before; both are cgroups.

    ``others`` are the cgroups of other pods. A job that is not ``new`` and has no note began under a daemon without
    notes, and keeps its files as a whole. Raises OSError, RefusedError.
    """
    if cgroup.get_xattr(step, _FILTERED) or not (new or cgroup.get_xattr(job, _FILTERED)):
        return False
    mine, left = len(_noted(job)), MOST_PLACES - sum(len(places(at)) for at in others)
    if mine >= min(MOST_STEPS, left // 2):
        raise RefusedError(f"cgroup {job}: {mine} steps of this job have GPUs, and no more fit; end some first")
    for at in (job, step):
        cgroup.set_xattr(at, _FILTERED, "1")
    return True


def places(at: str) -> list[str]:
    """Return the cgroups in which a device file of a pod, whose cgroup is ``at``, may be used. Raises OSError."""
    return _noted(at) if cgroup.get_xattr(at, _FILTERED) else [at]


def _noted(job: str) -> list[str]:
    """Return the steps of a job that are noted; none if it has ended. Raises OSError."""
    try:
        found = [f"{job}/{name}" for name in os.listdir(cgroup.directory_of(job))]
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENODEV):
            raise
        return []
    return [below for below in found if cgroup.get_xattr(below, _FILTERED)]
