"""Random calls by the million on the sanitizer's kernel, without Python in the guest: it takes minutes to start there.

    million.py [--calls N] [--seconds S] [--round N] [--seed N] [--timeout S] [--results FILE]

A round loads the module, lets four processes make random calls (guest/fuzz.c: two daemons on /dev/qgpu, two pods on
the driver's files), unloads it and looks whether anything is left. At the end kmemleak and lockdep are asked.
Runs of the same sources add up in the results (added.py); each goes on with the seeds after the last one's.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import added
import kernels
import lane
import sources
import vm

sys.path.insert(0, str(Path(__file__).resolve().parent / "guest"))
import corpus

ROW = "sanitizer random calls"

_ROUNDS = """
fail() {{ echo "round $n: $*"; exit 1; }}
cd {out}
k=/sys/kernel/debug/kmemleak
echo scan=off >$k	# its own scans would take most of the time; two are made at the end
insmod ./nvidia.ko || fail nvidia
mknod -m 666 /dev/nvidiactl c 195 255; mknod -m 666 /dev/nvidia0 c 195 0
echo 0 >/sys/module/nvidia/parameters/gate_us
c=/sys/fs/cgroup/fuzz; mkdir ${{c}}0 ${{c}}1 ${{c}}2
n=0
while [ $n -lt {rounds} ] && [ ! -e /run/share/enough ]; do
  read -r up rest </proc/uptime; [ "${{up%.*}}" -lt {seconds} ] || break
  insmod ./qgpu.ko || fail insmod
  pids=
  s=$(({seed} + 4 * n))
  ./fuzz $s {share} qgpu ${{c}}0 ${{c}}1 ${{c}}2 >/dev/null & pids="$pids $!"
  ./fuzz $((s + 1)) {share} qgpu ${{c}}0 ${{c}}1 ${{c}}2 >/dev/null & pids="$pids $!"
  ./fuzz $((s + 2)) {share} nvidia /run/share/corpus ${{c}}0 >/dev/null & pids="$pids $!"
  ./fuzz $((s + 3)) {share} nvidia /run/share/corpus ${{c}}1 >/dev/null & pids="$pids $!"
  for p in $pids; do wait $p || fail fuzz; done
  rmmod qgpu || fail rmmod
  read -r clients nr objects left rest </proc/driver/nvidia/sim
  [ "$nr $left" = "0 0" ] || fail "$nr clients and $left objects left"
  n=$((n + 1)); echo $((4 * {share} * n)) >/run/share/calls
done
rmmod nvidia || fail driver
sleep 6; echo scan >$k; sleep 6; echo scan >$k
grep -E -c "qgpu|nvidia" $k >/run/share/leaks
grep -c "debug_locks: *1$" /proc/lockdep_stats >/run/share/lockdep
[ "$(cat /run/share/leaks) $(cat /run/share/lockdep)" = "0 1" ] || fail leaks or lockdep
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=1_000_000)
    parser.add_argument("--round", type=int, default=20_000, help="calls between loading and unloading")
    parser.add_argument("--seconds", type=int, default=1_000_000, help="no further round after so many in the guest")
    parser.add_argument("--seed", type=int, help="1, or what follows on the runs that the results hold")
    parser.add_argument("--timeout", type=float, default=3600, help="seconds the guest may take")
    parser.add_argument("--results", type=Path, help="JSON file the figures go to")
    arguments = parser.parse_args()
    kernel = kernels.get("sanitizer", lane.CACHE)
    out = lane.build(kernel)
    rounds = -(-arguments.calls // arguments.round)
    results = lane.read(arguments.results)
    row = added.row(results, ROW, sources.digest(lane.ROOT / "kmod", lane.HERE / "simnv"))
    first = arguments.seed or row["next_seed"]
    if first < row["next_seed"]:
        parser.error(f"--seed {first}: {arguments.results} counts it already; leave it out or take {row['next_seed']}")
    script = _ROUNDS.format(out=out, rounds=rounds, seconds=arguments.seconds, seed=first, share=arguments.round // 4)
    with tempfile.TemporaryDirectory(prefix="qgpu-share.") as folder:
        share = Path(folder)
        traces = sorted((lane.ROOT / "tests" / "data" / "traces").glob("*.jsonl.xz"))
        (share / "corpus").write_bytes(corpus.corpus(traces))
        print(f"{rounds} rounds; touch {share}/enough to end after the one under way", flush=True)
        outcome = vm.boot(
            kernel.boot(),
            ["/bin/sh", "-c", script],
            share=share,
            cwd=out,
            timeout_s=arguments.timeout,
            append=kernel.append,
        )
        paths = [share / name for name in ("calls", "leaks", "lockdep")]
        numbers = {path.name: int(path.read_text()) for path in paths if path.exists()}
    faults = [line for line in outcome.dmesg.splitlines() if any(fault in line for fault in lane.FAULTS)]
    if outcome.status or outcome.status is None or faults:
        print("\n".join(outcome.dmesg.splitlines()[-400:]), outcome.output, outcome.stuck, sep="\n")
    print(f"status {outcome.status}, {len(faults)} faults, {numbers}, {outcome.seconds:.0f} s in the VM")
    clean = outcome.status == 0 and not faults
    if arguments.results:
        calls = numbers.get("calls", 0)
        results = lane.read(arguments.results)
        results[ROW] = row | {
            "kernel": f"{kernel.release} with KASAN, UBSAN, lockdep, kmemleak",
            "driver": "simulated",
            "command": lane.command(),
            "date": time.strftime("%Y-%m-%d"),
            "next_seed": first + 4 * (calls // arguments.round + 1),
            "figures": added.figures(
                row["figures"],
                {
                    "fuzz_calls": calls,
                    "load_unload_cycles": calls // arguments.round,
                    "boots": 1,
                    "boots_failed": int(not clean),
                    "kernel_reports": len(faults),
                    "kmemleak_in_modules": numbers.get("leaks", 0),
                    "lockdep_on_at_the_end": numbers.get("lockdep", 0),
                },
            ),
        }
        arguments.results.write_text(json.dumps(results, indent=2, sort_keys=True) + "\n")
    return 0 if clean else 1


if __name__ == "__main__":
    sys.exit(main())
