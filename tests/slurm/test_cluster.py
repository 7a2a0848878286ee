"""Jobs of real Slurms become pods of a real qgpud, with what Slurm gave them and no more."""

from __future__ import annotations

import errno
import platform
import re
import signal
import socket
import subprocess
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from qgpu.guardian.proxy import seccomp_filter
from qgpu.ipc import wire
from qgpu.ipc.control_socket import MAX_CLIENTS, Client
from qgpu.linux import untrusted_fds
from qgpu.planes.sim.hardware import H200
from qgpu.runtime.agent import LISTENER
from tests.runtime.test_agent import CONTROL, REFUSED, Guard
from tests.slurm.cluster import NODES, ROOT, Cluster

pytestmark = [pytest.mark.slurm, pytest.mark.root]

SLEEP = ("/usr/bin/sleep", "infinity")
#: All that a user may hope to be believed.
FORGED = {
    "SLURM_SHARDS_ON_NODE": "100",
    "SLURM_STEP_GPUS": "1",
    "SLURM_JOB_GPUS": "0,1",
    "SLURM_GPUS_ON_NODE": "2",
    "CUDA_VISIBLE_DEVICES": "0,1",
    "QGPU_POD": "another",
}
GIB = 1 << 30


def limits(pod: dict[str, Any]) -> dict[int, tuple[int | None, int | None]]:
    """Return cores and memory by pGPU."""
    return {grant["gpu"]: (grant["cores"], grant["memory"]) for grant in pod["grants"]}


def part(shards: int) -> tuple[int, int]:
    """Return what a pod gets for its shards."""
    return shards, H200.memory * shards // 100


def the_pod(cluster: Cluster, node: str = "n1", processes: int = 1) -> dict[str, Any]:
    """Wait until a node has one pod with this many processes, and return it."""
    cluster.wait(
        lambda: [len(pod["pids"]) for pod in cluster.pods(node).values()] == [processes],
        f"a pod of {processes} on {node}",
    )
    (pod,) = cluster.pods(node).values()
    return pod


def test_a_step_with_shards_is_a_pod_in_proportion(cluster: Cluster) -> None:
    cluster.popen("srun", "--gres=shard:30", *SLEEP)

    pod = the_pod(cluster)

    assert re.fullmatch(r"slurm-[0-9]+", pod["name"])
    assert limits(pod) == {0: part(30)}
    assert [grant["class"] for grant in pod["grants"]] == ["offline"]


def test_a_program_sees_its_pod_and_its_exit_code_comes_back(cluster: Cluster) -> None:
    ended = cluster.run("srun", "--gres=shard:30", "sh", "-c", "echo $QGPU_POD $QGPU_GPU; exit 7")

    assert re.fullmatch(r"slurm-[0-9]+ 0\n", ended.stdout), ended.stderr
    assert ended.returncode == 7


def test_all_tasks_of_a_step_are_one_pod(cluster: Cluster) -> None:
    cluster.popen("srun", "-n", "3", "--gres=shard:30", *SLEEP)

    assert limits(the_pod(cluster, processes=3)) == {0: part(30)}


def test_more_tasks_than_qgpud_serves_at_once_all_start(cluster: Cluster) -> None:
    places, many = 8, 64
    with ExitStack() as others:
        for _ in range(MAX_CLIENTS - places):
            others.enter_context(Client(cluster.work / "n1/run")).call("status")
        ended = cluster.run("srun", "--overcommit", "-w", "n1", "-n", str(many), "--gres=shard:30", "/bin/echo", "ran")

    assert ended.stdout.split() == ["ran"] * many, ended.stderr


def test_a_batch_script_and_its_steps_hold_the_shards_once(cluster: Cluster) -> None:
    cluster.batch("srun sleep infinity & srun --overlap sleep infinity & wait", "--gres=shard:30")

    assert limits(the_pod(cluster, processes=3)) == {0: part(30)}


def test_steps_of_an_allocation_share_what_the_larger_has(cluster: Cluster) -> None:
    script = "srun --exact -n1 --gres=shard:20 sleep infinity & srun --exact -n1 --gres=shard:40 sleep infinity & wait"
    cluster.popen("salloc", "-n", "2", "--gres=shard:60", "sh", "-c", script)

    assert limits(the_pod(cluster, processes=2)) == {0: part(40)}


def test_a_step_without_gpus_is_no_pod(cluster: Cluster) -> None:
    ended = cluster.run("srun", "sh", "-c", "echo ran $QGPU_POD")

    assert ended.stdout == "ran\n", ended.stderr


def test_a_job_on_two_nodes_is_a_pod_on_each(cluster: Cluster) -> None:
    cluster.popen("srun", "-N", "2", "--gres=shard:30", *SLEEP)

    assert {node: limits(the_pod(cluster, node)) for node in NODES} == {node: {0: part(30)} for node in NODES}


def test_whole_gpus_are_granted_whole(cluster: Cluster) -> None:
    cluster.popen("srun", "--gpus=2", "-N", "1", *SLEEP)

    assert limits(the_pod(cluster)) == {0: (100, None), 1: (100, None)}


def test_shards_of_the_second_gpu_are_granted_there(cluster: Cluster) -> None:
    cluster.popen("srun", "-w", "n1", "--gres=shard:80", *SLEEP)
    first = the_pod(cluster)
    cluster.popen("srun", "-w", "n1", "--gres=shard:50", *SLEEP)
    cluster.wait(lambda: len(cluster.pods()) == 2, "both jobs' pods")

    (second,) = (pod for name, pod in cluster.pods().items() if name != first["name"])

    assert limits(first) == {0: part(80)}
    assert limits(second) == {1: part(50)}


def test_each_task_of_an_array_is_a_pod(cluster: Cluster) -> None:
    cluster.batch("exec sleep infinity", "--array=1-3", "--gres=shard:30", "-w", "n1")
    cluster.wait(lambda: len(cluster.pods()) == 3, "a pod for each")

    assert [limits(pod) for pod in cluster.pods().values()] == [{0: part(30)}] * 3


def test_jobs_beyond_a_card_wait_in_slurm_not_in_qgpu(cluster: Cluster) -> None:
    jobs = [cluster.batch("exec sleep infinity", "--gres=shard:60", "-w", "n1") for _ in range(3)]
    cluster.wait(lambda: len(cluster.pods()) == 2, "two jobs on two cards")

    assert cluster.state(jobs[2]) == "PENDING"


def test_a_job_on_two_nodes_starts_on_both_or_on_none(cluster: Cluster) -> None:
    first, _ = (cluster.batch("exec sleep infinity", "--gres=shard:60", "-w", "n1") for _ in range(2))
    cluster.wait(lambda: len(cluster.pods()) == 2, "a job on each card of the first node")
    before = set(cluster.pods())

    job = cluster.batch("srun sleep infinity", "-N", "2", "--gres=shard:60")
    cluster.wait(lambda: cluster.reason(job) == "Resources", "Slurm has found no room for it")

    assert cluster.state(job) == "PENDING"
    assert [set(cluster.pods(node)) for node in NODES] == [before, set()]
    cluster.run("scancel", first)
    cluster.wait(lambda: all(f"slurm-{job}" in cluster.pods(node) for node in NODES), "its pods")
    assert [limits(cluster.pods(node)[f"slurm-{job}"]) for node in NODES] == [{0: part(60)}] * 2


def test_a_cancelled_job_leaves_no_pod(cluster: Cluster) -> None:
    job = cluster.batch("sleep infinity", "--gres=shard:30")
    pod = the_pod(cluster)

    cluster.run("scancel", job)

    cluster.wait(lambda: pod["name"] not in cluster.pods(), "its pod ends")


def test_preemption_with_requeue_swaps_the_pods(cluster: Cluster) -> None:
    loser = cluster.batch("exec sleep infinity", "--gpus=2", "--requeue", "-w", "n1")
    cluster.wait(lambda: f"slurm-{loser}" in cluster.pods(), "the low job's pod")

    winner = cluster.batch("exec sleep infinity", "--gres=shard:90", "-p", "high", "-w", "n1")

    cluster.wait(lambda: set(cluster.pods()) == {f"slurm-{winner}"}, "the high job's pod alone")
    assert cluster.state(loser) == "PENDING"
    cluster.run("scancel", winner)
    requeued = time.time()
    cluster.wait(lambda: time.time() > requeued + 2, "Slurm's patience: it tells a job's two runs apart by the second")
    cluster.run("scontrol", "update", f"JobId={loser}", "StartTime=now", user="root")  # otherwise in two minutes
    cluster.wait(lambda: set(cluster.pods()) == {f"slurm-{loser}"}, "the low job's pod again")
    assert limits(cluster.pods()[f"slurm-{loser}"]) == {0: (100, None), 1: (100, None)}


def test_jobs_outlive_a_restart_of_slurmd(cluster: Cluster) -> None:
    job = cluster.batch("exec sleep infinity", "--gres=shard:30", "-w", "n1")
    before = the_pod(cluster)

    cluster.restart_slurmd("n1")
    ended = cluster.run("srun", "-w", "n1", "--gres=shard:30", "sh", "-c", "echo $QGPU_POD")

    assert ended.stdout.startswith("slurm-"), ended.stderr
    assert the_pod(cluster)["pids"] == before["pids"]
    assert cluster.state(job) == "RUNNING"


@pytest.mark.parametrize("word", ["required", "optional"])
def test_without_qgpud_no_task_starts_and_one_line_says_why(cluster: Cluster, word: str) -> None:
    cluster.plugstack(word=word)
    cluster.daemons["n1"].stop()
    try:
        ended = cluster.run("srun", "-w", "n1", "--gres=shard:30", "touch", "/work/out/it-ran")
    finally:
        cluster.start_qgpud("n1")

    assert ended.returncode != 0
    assert not (cluster.work / "out/it-ran").exists()
    (line,) = (line for line in ended.stderr.splitlines() if "qgpu:" in line)
    assert re.search(r"qgpu: /run/qgpu/root.sock: .*; is qgpud running\?$", line)


def test_with_drain_a_node_without_qgpud_keeps_its_jobs_waiting(cluster: Cluster) -> None:
    cluster.plugstack("drain=yes")
    cluster.restart_slurmd("n1")
    cluster.daemons["n1"].stop()
    try:
        job = cluster.batch("touch /work/out/it-ran", "--gres=shard:30", "-w", "n1")
        cluster.wait(lambda: "drain" in cluster.run("sinfo", "-h", "-n", "n1", "-o", "%T").stdout, "node drained")

        assert cluster.state(job) == "PENDING"
    finally:
        cluster.start_qgpud("n1")
    assert not (cluster.work / "out/it-ran").exists()
    cluster.run("scontrol", "update", "NodeName=n1", "State=RESUME", user="root")
    cluster.run("scontrol", "release", job, user="root")
    cluster.run("scontrol", "update", f"JobId={job}", "StartTime=now", user="root")
    cluster.wait((cluster.work / "out/it-ran").exists, "the job runs after all")
    (cluster.work / "out/it-ran").unlink()


def test_no_task_starts_beside_a_qgpud_that_hangs(cluster: Cluster) -> None:
    cluster.daemons["n1"].process.send_signal(signal.SIGSTOP)
    try:
        ended = cluster.run("srun", "-w", "n1", "--gres=shard:30", "touch", "/work/out/it-ran")
    finally:
        cluster.daemons["n1"].process.send_signal(signal.SIGCONT)

    assert ended.returncode != 0
    assert not (cluster.work / "out/it-ran").exists()
    assert "root.sock: no answer; the task does not start without its limits" in ended.stderr


def test_a_plugin_line_with_an_error_starts_no_task(cluster: Cluster) -> None:
    cluster.plugstack("shards=many shard=3", word="optional")

    ended = cluster.run("srun", "--gres=shard:30", "touch", "/work/out/it-ran")

    assert ended.returncode != 0
    assert not (cluster.work / "out/it-ran").exists()


def test_what_does_not_fit_is_refused_with_the_daemons_line(cluster: Cluster) -> None:
    with Client(cluster.work / "n1/run") as client:
        client.call("pod.create", name="outsider", grants={"0": {"cores": 80}, "1": {"cores": 80}})
        ended = cluster.run("srun", "-w", "n1", "--gres=shard:30", "touch", "/work/out/it-ran")

    assert ended.returncode != 0
    assert "qgpu: pGPU 0: 30 % for pod slurm-" in ended.stderr
    assert not (cluster.work / "out/it-ran").exists()


def test_forged_variables_of_a_step_change_nothing(cluster: Cluster) -> None:
    cluster.popen("srun", "--gres=shard:30", "--export=ALL", *SLEEP, env=FORGED)

    assert limits(the_pod(cluster)) == {0: part(30)}


def test_forged_variables_of_a_batch_job_change_nothing(cluster: Cluster) -> None:
    forged = "; ".join(f"export {name}={value}" for name, value in FORGED.items())
    cluster.batch(f"{forged}; srun sleep infinity & wait", "--gres=shard:30", "--export=ALL", env=FORGED)

    assert limits(the_pod(cluster, processes=2)) == {0: part(30)}


def test_forged_variables_bring_no_gpu_to_a_job_without(cluster: Cluster) -> None:
    ended = cluster.run("srun", "--export=ALL", "sh", "-c", "sleep 1; echo ran", env=FORGED)

    assert ended.stdout == "ran\n", ended.stderr
    assert not any(cluster.pods(node) for node in NODES)


def test_forged_shards_beside_whole_gpus_only_lower(cluster: Cluster) -> None:
    cluster.popen("srun", "--gpus=1", "--export=ALL", *SLEEP, env=FORGED | {"SLURM_SHARDS_ON_NODE": "9999"})

    assert limits(the_pod(cluster)) == {0: (100, None)}


def test_a_step_with_gpus_cannot_pass_for_one_without(cluster: Cluster) -> None:
    cluster.popen("srun", "--gres=shard:30", "--export=NONE", *SLEEP)

    assert limits(the_pod(cluster)) == {0: part(30)}


@pytest.mark.parametrize(("asked", "expected"), [("8GiB", 8 * GIB), ("1TiB", part(30)[1])])
def test_a_user_lowers_the_memory_but_never_raises_it(cluster: Cluster, asked: str, expected: int) -> None:
    cluster.popen("srun", "--gres=shard:30", f"--qgpu-memory={asked}", *SLEEP)

    assert limits(the_pod(cluster)) == {0: (30, expected)}


def test_a_batch_jobs_memory_holds_in_its_steps_too(cluster: Cluster) -> None:
    cluster.batch("srun sleep infinity & wait", "--gres=shard:30", "--qgpu-memory=8GiB")

    assert limits(the_pod(cluster, processes=2)) == {0: (30, 8 * GIB)}


def test_the_administrators_limits_win(cluster: Cluster) -> None:
    cluster.plugstack("shards=200 class=online max_memory=4GiB")
    cluster.popen("srun", "--gres=shard:30", "--qgpu-memory=8GiB", *SLEEP)

    pod = the_pod(cluster)

    assert limits(pod) == {0: (15, 4 * GIB)}
    assert [grant["class"] for grant in pod["grants"]] == ["online"]


def test_a_later_step_does_not_undo_pod_set(cluster: Cluster) -> None:
    job = cluster.batch(
        "sleep 1; while [ ! -e go-$SLURM_JOB_ID ]; do sleep 0.1; done; srun sleep infinity", "--gres=shard:30"
    )
    cluster.wait(lambda: f"slurm-{job}" in cluster.pods(), "its pod")
    with Client(cluster.work / "n1/run") as client:
        client.call("pod.set", name=f"slurm-{job}", cores=10)
    (cluster.work / f"out/go-{job}").touch()
    cluster.wait(lambda: len(cluster.pods()[f"slurm-{job}"]["pids"]) == 2, "its step")

    assert limits(cluster.pods()[f"slurm-{job}"]) == {0: (10, part(30)[1])}


class StandIn:
    """A daemon's socket on plane seccomp, which needs a GPU: a real dispatcher, with RM in a table, takes listeners."""

    def __init__(self, path: Path, guard: Guard) -> None:
        self._door = wire.listen(str(path), 0o666)
        self._guard = guard
        self.requests: list[dict[str, Any]] = []
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                sock, _ = self._door.accept()
            except OSError:
                return
            threading.Thread(target=self._hear, args=(wire.Connection(sock),), daemon=True).start()

    def _hear(self, connection: wire.Connection) -> None:
        while (received := connection.receive()) is not None:
            message, fds = received
            self.requests.append(message)
            for fd in fds:
                assert untrusted_fds.kind(fd) == LISTENER
                self._guard.take(connection.peer().pid, fd)
            connection.send(self._answer(message))

    def _answer(self, message: dict[str, Any]) -> dict[str, Any]:
        if message["op"] == "slurm.filter":
            return {"ok": True, "filter": seccomp_filter.program(platform.machine()).hex()}
        return {"ok": True, "plane": "seccomp", "variables": 'A=1\nQGPU_POD=slurm µ "1"'}

    def close(self) -> None:
        """Accept no more."""
        self._door.shutdown(socket.SHUT_RDWR)
        self._door.close()


def test_on_plane_seccomp_a_tasks_calls_reach_the_guardian(cluster: Cluster, tmp_path: Path) -> None:
    calls = cluster.work / "out/calls"
    source = ROOT / "tests/runtime/calls.c"
    subprocess.run(["cc", "-O2", "-static", "-Wall", "-o", str(calls), str(source)], check=True)
    guard = Guard(tmp_path)
    guard.shared.note({"fact": "pod", "name": "web", "grants": {}})
    cluster.daemons["n1"].stop()
    stand_in = StandIn(cluster.work / "n1/run/root.sock", guard)
    try:
        script = (
            f"grep -E '^(Seccomp:|NoNewPrivs)' /proc/self/status; echo $QGPU_POD; /work/out/calls control {CONTROL}"
        )
        epilog = cluster.work / "out/epilog"
        epilog.write_text(f"#!/bin/sh\n/work/out/calls control {CONTROL} >/work/out/epilogs\n")
        epilog.chmod(0o755)
        options = ("-w", "n1", "--gres=shard:30", "--task-epilog=/work/out/epilog")
        ended = cluster.run("srun", *options, "/bin/sh", "-c", script)
    finally:
        stand_in.close()
        guard.close()
        cluster.start_qgpud("n1")

    assert ended.stdout == f'NoNewPrivs:\t0\nSeccomp:\t2\nslurm µ "1"\n{REFUSED}', ended.stderr
    assert guard.shared.refusals.counts["web", "NV2080_CTRL_CMD_FIFO_DISABLE_CHANNELS"] == 1
    assert sorted(message["op"] for message in stand_in.requests) == ["slurm.bind", "slurm.filter", "slurm.filter"]
    (bound,) = (message for message in stand_in.requests if message["op"] == "slurm.bind")
    assert bound.keys() == {"op", "job", "uid", "gpus", "shards"}
    assert (cluster.work / "out/epilogs").read_text().startswith(f"-1 {errno.EPERM} ")
