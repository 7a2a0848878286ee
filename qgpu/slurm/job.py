"""A Slurm job on this node: what Slurm gave one of its steps, the grants that follow, and its cgroup.

All steps of a job on a node are one pod, because they share the job's resources: a batch script and the steps that it
starts, or steps with ``--overlap``, would otherwise hold them several times. The pod's grant on a pGPU is the largest
grant of a step there, so it never exceeds the job's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from qgpu import units
from qgpu.errors import InvalidValueError, RefusedError, no_pgpu
from qgpu.model import Grant, PodClass
from qgpu.model.plane_api import Pgpu

#: How many shards a card has unless plugstack.conf says otherwise: then a shard is one per cent.
SHARDS_OF_A_CARD = 100
#: The most characters of a list of cards, and the most digits of a number, that the plugin may send.
_MOST_TEXT, _DIGITS = 1024, 9
#: The name of a job's cgroup from Slurm 26.05 on, without CgroupJobIdPaths=yes; before, it is job_ID (cgroup_v2.c).
_SLUID = "s[0-9A-HJKMNP-TV-Z]{13}"
#: The end of a job's cgroup path, and the part below it where slurmstepd itself runs; root owns both.
_JOB, _SLURMSTEPD = re.compile(rf"/(job_[0-9]+|{_SLUID})\Z"), re.compile(r"/step_[^/]+/slurm")
#: The names of jobs' pods.
_POD = re.compile(r"slurm-[0-9]+")


@dataclass(frozen=True, slots=True)
class Step:
    """What Slurm gave a step on this node, by slurmstepd's variables, and the lowest memory limit, in bytes.

    Without ``shards`` the step has whole cards.
    """

    job: int
    gpus: tuple[int, ...]
    shards: int | None = None
    shards_of_a_card: int = SHARDS_OF_A_CARD
    pod_class: PodClass = PodClass.OFFLINE
    memory: int | None = None
    #: The uid of the job's user; None if the plugin's version does not send it.
    uid: int | None = None

    @property
    def pod(self) -> str:
        """The name of the job's pod."""
        return f"slurm-{self.job}"

    def grants(self, cards: Mapping[int, Pgpu]) -> dict[int, Grant]:
        """Return the step's grants: cores and memory in proportion to its shards. Raises a QgpuError."""
        whole = self.shards_of_a_card
        if self.shards is not None and len(self.gpus) > 1 and self.shards < whole * len(self.gpus):
            raise RefusedError(
                f"job {self.job}: {self.shards} shards on {len(self.gpus)} GPUs, and Slurm does not say how many on "
                "which; ask for shards of one GPU, or for whole GPUs"
            )
        here = whole if self.shards is None else min(whole, self.shards)
        if (cores := here * 100 // whole) < 1:
            raise RefusedError(
                f"job {self.job}: {here} of {whole} shards are less than 1 % of a GPU; ask for more shards"
            )
        return {index: self._grant(cores, here, self._card(index, cards)) for index in self.gpus}

    def _card(self, index: int, cards: Mapping[int, Pgpu]) -> Pgpu:
        if index not in cards:
            raise no_pgpu(index, cards)
        return cards[index]

    def _grant(self, cores: int, shards: int, card: Pgpu) -> Grant:
        whole = self.shards_of_a_card
        in_proportion = None if shards == whole else card.memory * shards // whole
        limits = [limit for limit in (in_proportion, self.memory) if limit is not None]
        return Grant(self.pod_class, cores, min(limits, default=None))


def described(raw: Mapping[str, Any]) -> Step:
    """Read the plugin's description of a step. Raises InvalidValueError."""
    job = raw.get("job")
    if not isinstance(job, int) or isinstance(job, bool) or job <= 0:
        raise InvalidValueError(f"job {job!r}: a job is named by its number")
    uid = raw.get("uid")
    if uid is not None and (not isinstance(uid, int) or isinstance(uid, bool) or uid < 0):
        raise InvalidValueError(f"job {job}: uid {uid!r}: a user is named by a number")
    listed = _text(raw, "gpus")
    gpus = tuple(dict.fromkeys(_number("gpus", each) for each in listed.split(","))) if listed else ()
    if not gpus:
        raise InvalidValueError(f"job {job}: it names no GPU")
    shards, whole = _text(raw, "shards"), _text(raw, "per_card")
    limits = [units.parse_memory_limit(limit) for limit in (_text(raw, "memory"), _text(raw, "max_memory")) if limit]
    of_a_card = _number("per_card", whole) if whole else SHARDS_OF_A_CARD
    if of_a_card < 1:
        raise InvalidValueError("plugstack.conf: shards=0: a card has at least one shard")
    return Step(
        job,
        gpus,
        _number("shards", shards) if shards else None,
        of_a_card,
        units.parse_choice(PodClass, _text(raw, "class") or PodClass.OFFLINE.value),
        min(limits, default=None),
        uid,
    )


def larger(one: Grant, other: Grant) -> Grant:
    """Return the larger of two grants, limit by limit, with the class of ``other``."""
    return replace(other, cores=_larger(one.cores, other.cores), memory=_larger(one.memory, other.memory))


def cgroup_of(job: int, path: str) -> str:
    """Return the job's cgroup that contains cgroup ``path``; empty if there is none.

    It is the outermost cgroup of such a name: users may own the cgroups below, and choose their names.
    """
    found = re.match(rf"(.*?/(?:job_{job}|{_SLUID}))/step_", path, re.DOTALL)
    return found[1] if found else ""


def step_of(job: str, path: str) -> str:
    """Return the step's cgroup that contains cgroup ``path``, in the cgroup of its job; empty if there is none."""
    found = re.match(rf"{re.escape(job)}/step_[^/]+", path)
    return found[0] if found else ""


def is_pod_name(name: str) -> bool:
    """Tell whether a name is reserved for pods of Slurm jobs."""
    return _POD.fullmatch(name) is not None


def is_slurmstepd(path: str, pod: str) -> bool:
    """Tell whether a cgroup in that of a job's pod is slurmstepd's own."""
    return _JOB.search(pod) is not None and path.startswith(pod) and _SLURMSTEPD.fullmatch(path[len(pod) :]) is not None


def variables(plane: str, step: Step) -> dict[str, str]:
    """Return the variables that a step's tasks get in addition to Slurm's."""
    added = {"QGPU_POD": step.pod, "QGPU_PLANE": plane, "QGPU_GPU": ",".join(map(str, step.gpus))}
    # on the simulator, hide real GPUs: nothing would hold the pod to its limits on them
    return added | ({"CUDA_VISIBLE_DEVICES": ""} if plane == "sim" else {})


def _larger(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else max(one, other)


def _text(raw: Mapping[str, Any], name: str) -> str:
    value = raw.get(name, "")
    if not isinstance(value, str) or len(value) > _MOST_TEXT:
        raise InvalidValueError(f"{name}: wants a text of at most {_MOST_TEXT} letters")
    return value


def _number(name: str, text: str) -> int:
    if not (text.isascii() and text.isdecimal()) or len(text) > _DIGITS:
        raise InvalidValueError(f"{name} {text[: _DIGITS + 1]!r}: wants a whole number")
    return int(text)
