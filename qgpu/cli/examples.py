"""Examples of every command of ``qgpuctl``, and what its arguments mean, for its help and its manual page.

Tests check that all examples parse.
"""

from __future__ import annotations

#: The examples of qgpuctl itself.
FIRST_STEPS = (
    "qgpuctl doctor",
    "qgpuctl run --cores 60 --memory 16GiB --name train -- python train.py",
    "qgpuctl top",
    "qgpuctl pod set train --cores 30",
    "qgpuctl gpu policy set 0 fixed-share",
    "qgpuctl man pod set",
)

#: The commands whose first example is one of their group.
GROUPS: dict[str, tuple[str, ...]] = {
    "cdi": ("cdi show", "cdi generate"),
    "gpu": ("gpu show", "gpu policy set"),
    "gpu policy": ("gpu policy set",),
    "grant": ("grant list", "grant drop"),
    "group": ("group create", "group show"),
    "module": ("module show", "module off"),
    "pod": ("pod list", "pod set"),
}

#: What an argument means, by its name and the first word of the command.
ARGUMENTS = {
    ("completion", "shell"): "The shell that is to complete.",
    ("gpu", "index"): "The pGPU: its number or its UUID.",
    ("gpu", "policy_name"): "The policy: its name or its number.  [default: unchanged]",
    ("grant", "uid"): "UID of the claim, as 'qgpuctl grant list' shows it.",
    ("group", "name"): "Name of the group.",
    ("man", "words"): "The command, such as pod set.  [default: qgpuctl itself]",
    ("pod", "name"): "Name of the pod, as 'qgpuctl pod list' shows it.",
    ("run", "command"): "The command that runs in the pod, and its arguments.",
    ("simulate", "scenario"): "File of the scenario (TOML).",
}

EXAMPLES: dict[str, tuple[str, ...]] = {
    "cdi show": ("qgpuctl cdi show",),
    "cdi generate": ("qgpuctl cdi generate --dir /run/cdi",),
    "cdi profile": ("qgpuctl cdi profile > qgpu.json", "qgpuctl cdi profile --unconfined > qgpu.json"),
    "completion": (
        'eval "$(qgpuctl completion bash)"',
        "qgpuctl completion fish > ~/.config/fish/completions/qgpuctl.fish",
    ),
    "doctor": ("qgpuctl doctor", "qgpuctl doctor --self-test --gpu 1"),
    "events": ("qgpuctl events", "qgpuctl events --settings --count 10"),
    "gpu list": ("qgpuctl gpu list -o json",),
    "gpu show": ("qgpuctl gpu show 0",),
    "gpu policy set": (
        "qgpuctl gpu policy set 0 fixed-share",
        "qgpuctl gpu policy set 0 burst-share --period 50ms",
        "qgpuctl gpu policy set 0 --offline-floor 10%",
        "qgpuctl gpu policy set 0 --memory-overcommit 2.0",
    ),
    "grant list": ("qgpuctl grant list",),
    "grant drop": ("qgpuctl grant drop 7d5f2c1e-52a1-4e0b-9d34-9be6f6b1c0aa",),
    "group create": ("qgpuctl group create llm --cores 60 --memory 40GiB",),
    "group list": ("qgpuctl group list",),
    "group remove": ("qgpuctl group remove llm",),
    "group serve": ("qgpuctl group serve",),
    "group set": ("qgpuctl group set llm --cores 40 --sm 25",),
    "group show": ("qgpuctl group show llm",),
    "man": ("qgpuctl man pod set", "qgpuctl man qgpud", "qgpuctl man --write ~/.local/share/man/man1"),
    "module show": ("qgpuctl module show",),
    "module off": ("qgpuctl module off",),
    "module on": ("qgpuctl module on",),
    "pod list": ("qgpuctl pod list",),
    "pod show": ("qgpuctl pod show train", "qgpuctl pod show train -o json"),
    "pod set": (
        "qgpuctl pod set train --cores 30 --memory 16GiB",
        "qgpuctl pod set chat --class online --latency-target 2ms",
        "qgpuctl pod set train --cores none",
    ),
    "pod suspend": ("qgpuctl pod suspend train",),
    "pod resume": ("qgpuctl pod resume train",),
    "pod move": ("qgpuctl pod move train --gpu 1",),
    "gpu drain": ("qgpuctl gpu drain 0",),
    "report": ("qgpuctl report --seconds 30 --out report.html",),
    "run": (
        "qgpuctl run --cores 60 --memory 16GiB --name train -- python train.py",
        "qgpuctl run --class online -- ./serve",
        "qgpuctl run --group llm --sm 50 -- ./serve",
        "qgpuctl run --gpu 0 --gpu 1 -- torchrun --nproc-per-node 2 train.py",
    ),
    "simulate": (
        "qgpuctl simulate examples/scenarios/two-to-one.toml",
        "qgpuctl simulate examples/scenarios/online-over-offline.toml --plot shares.png",
    ),
    "status": ("qgpuctl status", "qgpuctl --timeout 60 status -o json"),
    "top": ("qgpuctl top", "qgpuctl top -1", "qgpuctl top -o json --every 5"),
    "trace": ("qgpuctl trace --seconds 10 --out qgpu.pftrace",),
    "web": ("qgpuctl web", "qgpuctl web --listen localhost:8080 --allow-changes"),
}
