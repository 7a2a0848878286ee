"""The demo's scenes, each with the changes at its start and the shares that should follow.

Pure data. private_daemon.py makes the changes; live_table.py and plot.py show the result.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class DemoPod:
    """A pod of the demo: its load as options of qgpu-load, and its first grant."""

    name: str
    load: tuple[str, ...]
    cores: int | None = None
    pod_class: str = "offline"


TRAIN = DemoPod("train", ("--kernel", "1ms"), cores=60)
BATCH = DemoPod("batch", ("--kernel", "1ms"), cores=30)
CHAT = DemoPod("chat", ("--kernel", "100us", "--period", "10ms", "--watch"))


@dataclass(frozen=True, slots=True)
class Scene:
    """One scene: what changes at its beginning, and the shares that should follow."""

    caption: str
    policy: str
    seconds: float
    #: Pods that start, pods that end.
    starts: tuple[DemoPod, ...] = ()
    ends: tuple[DemoPod, ...] = ()
    #: Arguments of ``qgpuctl pod set``, in this order.
    amend: tuple[tuple[str, ...], ...] = ()
    #: The share of the card that the policy defines for each pod, if it does.
    targets: Mapping[str, float] = field(default_factory=dict)


#: What chat leaves of the card once it always goes first: its kernels take 1 %, switching to them as much.
_LEFT = 0.98

SCENES = (
    Scene("one pod has the whole card", "best-effort", 7, starts=(TRAIN,), targets={"train": 1.0}),
    Scene("a second comes: half each", "best-effort", 8, starts=(BATCH,), targets={"train": 0.5, "batch": 0.5}),
    Scene("quotas 60 and 30, the rest lent 2:1", "burst-share", 8, targets={"train": 2 / 3, "batch": 1 / 3}),
    Scene("exactly the quotas, the rest idle", "fixed-share", 8, targets={"train": 0.6, "batch": 0.3}),
    Scene(
        "chat comes, as one among others",
        "burst-share",
        9,
        starts=(CHAT,),
        targets={"train": 2 / 3, "batch": 1 / 3},
    ),
    Scene(
        "chat is made online: it goes first",
        "burst-share",
        9,
        amend=(("chat", "--class", "online"),),
        targets={"train": _LEFT * 2 / 3, "batch": _LEFT / 3},
    ),
    Scene(
        "quotas swapped under way",
        "burst-share",
        8,
        amend=(("train", "--cores", "30"), ("batch", "--cores", "60")),
        targets={"train": _LEFT / 3, "batch": _LEFT * 2 / 3},
    ),
    Scene("train leaves: its time is lent", "burst-share", 6, ends=(TRAIN,), targets={"batch": _LEFT}),
)
