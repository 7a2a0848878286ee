"""How soon pods run at full speed after the daemon or a pod is killed."""

from __future__ import annotations

import signal

from figures import Figure, at_most, median, within
from pods import BenchError
from progress import Progress
from script import Script


def kill9(script: Script) -> list[Figure]:
    """Kill the daemon while a gate is closed, and measure how soon the pod runs at full speed."""
    script.need_card()
    seconds: list[float] = []
    for turn in range(6):
        with script.bench.daemon():
            script.bench.policy("fixed-share", "2s")
            pod = script.bench.pod("a", "1ms", cores=10)
            script.bench.wait_busy(pod)
            script.settle(2)
            script.bench.wait_gated(pod)
            killed_at = script.bench.kill_daemon()
            script.settle(3)
            done = pod.stop()
        if not done.between(killed_at - 0.1, killed_at):
            seconds.append(_recovery_s(done, killed_at))
            script.say(f"kill -9 {turn + 1}: full speed after {seconds[-1]:.2f} s")
        else:
            script.say(f"kill -9 {turn + 1}: the gate was open, does not count")
        if len(seconds) == 3:
            break
    if not seconds:
        raise BenchError("the gate was open each time the daemon was killed")
    note = "Fixed Share 10 %, period 2 s, killed while the gate was closed; worst; seen to 10 ms"
    return [median("kill9_recovery_s", seconds, *at_most(1, " s"), note=note, pick=max)]


def gated_kill(script: Script) -> list[Figure]:
    """Kill a pod while its gate is closed; compare its neighbour's speed after to before."""
    kept: list[float] = []
    for _ in range(2):
        with script.bench.daemon():
            script.bench.policy("fixed-share", "200ms")
            a = script.bench.pod("a", "1ms", cores=50)
            b = script.bench.pod("b", "1ms", cores=10)
            script.running(a, b)
            before = script.span(2)
            script.bench.wait_gated(b)
            b.load_process().send_signal(signal.SIGKILL)
            after = script.span(2)
            done = a.stop()
        kept.append(done.rate(after) / done.rate(before))
        script.say(f"gated pod killed: neighbour at {kept[-1]:.3f}")
    worst = min(kept, key=lambda value: -abs(value - 1))
    note = "Fixed Share 50 % beside 10 %; 2 s after SIGKILL over 2 s before; worst"
    return [median("gated_kill_neighbour", kept, *within(1.0), note=note, pick=lambda _: worst)]


def restart(script: Script) -> list[Figure]:
    """Kill the daemon under two pods and start another: it should know the pods, and share between them."""
    script.need_card()
    with script.bench.daemon():
        script.bench.policy("burst-share")
        a = script.bench.pod("a", "1ms", cores=66)
        b = script.bench.pod("b", "1ms", cores=33)
        script.running(a, b)
        script.bench.kill_daemon()
        script.settle(1.5)
        script.bench.start_daemon()
        script.settle(2)
        text = script.bench.ctl("pod", "list", "-o", "json")
        known = {pod["name"]: pod for pod in script.bench.pods()}
        found = all(f'"{pod.name}"' in text and known.get(pod.name, {}).get("pids") for pod in (a, b))
        script.say(
            f"restarted: pods found: {found}; " + "; ".join(f"{p['name']}: {p['problem']}" for p in known.values())
        )
        script.bench.policy("burst-share")
        script.settle(2)
        span = script.span(3)
        done_a, done_b = a.stop(), b.stop()
    again = done_a.rate(span) / done_b.rate(span)
    script.say(f"restarted: ratio {again:.3f}")
    return [
        Figure("restart_finds_pods", found, (), "true", found, "running, with their processes, in `pod list`"),
        median("restart_ratio_2_1", [again], note="quotas 66:33 again in force after kill -9 and a new daemon"),
    ]


def _recovery_s(done: Progress, killed_at: float) -> float:
    """Return the time from ``killed_at`` to the first half second at full speed."""
    full = max(done.between(killed_at + n / 10, killed_at + n / 10 + 0.5) for n in range(25))
    for n in range(250):
        start = killed_at + n / 100
        if done.between(start, start + 0.5) >= 0.9 * full and done.between(start, start + 0.02):
            return n / 100
    raise BenchError("never at full speed again")
