"""Tasks of a job bind themselves from the cgroups that Slurm makes, here made by hand as its version 2 plugin does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from qgpu.config import Config
from qgpu.daemon import pod_users, pods, slurm_steps
from qgpu.daemon.control_requests import ControlRequests
from qgpu.daemon.plane_choice import PlaneChoice
from qgpu.daemon.settings_file import SettingsFile
from qgpu.daemon.slurm_jobs import SlurmJobs
from qgpu.errors import InvalidValueError, NotSupportedError, RefusedError
from qgpu.ipc import wire
from qgpu.ipc.control_socket import Client, Server, Session
from qgpu.ipc.systemd import FdStore
from qgpu.linux import cgroup
from qgpu.model import Grant
from qgpu.model.plane_names import Plane
from qgpu.planes.sim.host import Clock, SimHost
from tests.daemon.test_device_isolation import FakeKernel

pytestmark = pytest.mark.root

#: A task: enters a cgroup, makes a request, goes to another cgroup, and sleeps. It prints the answer.
TASK = """
import json, sys, time
from pathlib import Path
from qgpu.ipc.control_socket import Client
from qgpu.errors import QgpuError
first, request, then, runtime = sys.argv[1:]
Path(first, "cgroup.procs").write_text("0")
try:
    with Client(Path(runtime)) as client:
        answer = client.call(**json.loads(request))
except QgpuError as error:
    answer = {"error": str(error)}
Path(then, "cgroup.procs").write_text("0")
print(json.dumps(answer), flush=True)
time.sleep(600)
"""


class Node:
    """A daemon, and the cgroups of a job of two steps."""

    def __init__(self, tmp_path: Path) -> None:
        self.runtime = tmp_path
        self.job = cgroup.mount() / f"qgpu-test-{os.getpid()}" / "job_7"
        for step in ("step_0", "step_1"):
            for leaf in ("slurm", "user/task_0"):
                (self.job / step / leaf).mkdir(parents=True)
        self.host = SimHost(2, Clock.REAL)
        self._start()
        self.tasks: list[subprocess.Popen[str]] = []

    def _start(self) -> None:
        self.requests = ControlRequests(self.host, PlaneChoice(Plane.SIM, "test"), Config(), SettingsFile(None))
        self._server = Server(self.runtime, 0o600, None, self.requests.handle, FdStore(), self.requests.pod_of)

    def restart(self) -> None:
        """Let another daemon take over."""
        self._server.close()
        self.requests.close()
        self._start()

    def task(self, step: int, request: dict[str, object], leaf: str = "slurm") -> dict[str, object]:
        """Start a task of a step, which makes a request as long as it is in a leaf of it; return the answer."""
        above = self.job / f"step_{step}"
        words = [str(above / leaf), json.dumps(request), str(above / "user/task_0"), str(self.runtime)]
        started = subprocess.Popen([sys.executable, "-c", TASK, *words], stdout=subprocess.PIPE, text=True)
        self.tasks.append(started)
        assert started.stdout is not None
        answer: dict[str, object] = json.loads(started.stdout.readline())
        return answer

    def bind(self, step: int, **facts: object) -> dict[str, object]:
        """Start a task that binds itself."""
        return self.task(step, {"op": "slurm.bind", "job": 7, "gpus": "0", **facts})

    def path(self, below: str = "") -> str:
        """Return the cgroup of the job, or one below it."""
        return "/" + str((self.job / below).relative_to(cgroup.mount()))

    def close(self) -> None:
        """End the tasks and the daemon, and remove the cgroups."""
        for task in self.tasks:
            task.kill()
            task.communicate()
        self._server.close()
        self.requests.close()
        for directory, _, _ in os.walk(self.job.parent, topdown=False):
            with suppress(FileNotFoundError):
                os.rmdir(directory)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    try:
        cgroup.mount()
    except NotSupportedError as error:
        pytest.skip(str(error))
    made = Node(tmp_path)
    yield made
    made.close()


def test_the_jobs_cgroup_is_the_pods(node: Node) -> None:
    answer = node.bind(0, shards="30")
    (pod,) = node.host.pods()

    assert answer["name"] == pod.name == "slurm-7"
    assert pod.cgroup == "/" + str(node.job.relative_to(cgroup.mount()))
    assert pod.pids == (node.tasks[0].pid,)
    assert pod.grants[0].cores == 30


def test_a_second_steps_task_joins_from_inside_the_pod(node: Node) -> None:
    node.bind(0, shards="30")
    answer = node.bind(1, shards="30")
    (pod,) = node.host.pods()

    assert answer["name"] == pod.name
    assert set(pod.pids) == {task.pid for task in node.tasks}
    assert pod.grants[0].cores == 30


def test_a_users_process_in_the_job_may_not_talk(node: Node) -> None:
    node.bind(0, shards="30")
    request = {"op": "slurm.bind", "job": 7, "gpus": "0", "shards": "100"}

    assert "pods may not talk to qgpud" in str(node.task(1, request, "user/task_0")["error"])
    assert node.host.pods()[0].grants[0].cores == 30


def test_a_larger_step_widens_the_pod_if_that_fits(node: Node) -> None:
    node.bind(0, shards="30")
    node.bind(1, shards="40")
    with Client(node.runtime) as client:
        client.call("pod.create", name="other", grants={"0": {"cores": 50}})

        assert "does not fit" in str(node.bind(1, shards="60")["error"])
    (pod,) = (pod for pod in node.host.pods() if pod.name == "slurm-7")
    assert pod.grants[0].cores == 40


def test_a_step_on_another_card_adds_that_card(node: Node) -> None:
    node.bind(0, shards="30")
    node.bind(1, gpus="1", shards="20")
    (pod,) = node.host.pods()

    assert {index: grant.cores for index, grant in pod.grants.items()} == {0: 30, 1: 20}


def test_what_an_administrator_set_stays(node: Node) -> None:
    node.bind(0, shards="30")
    with Client(node.runtime) as client:
        client.call("pod.set", name="slurm-7", cores=10)
    node.bind(1, shards="40")
    (pod,) = node.host.pods()

    assert pod.grants[0].cores == 10


@pytest.mark.parametrize(("limit", "cores"), [(None, 40), (10, 10)])
def test_next_daemon_knows_what_an_administrator_set(node: Node, limit: int | None, cores: int) -> None:
    node.bind(0, shards="30")
    if limit is not None:
        with Client(node.runtime) as client:
            client.call("pod.set", name="slurm-7", cores=limit)
    node.restart()
    node.bind(1, shards="40")
    (pod,) = node.host.pods()

    assert pod.grants[0].cores == cores


@pytest.mark.parametrize("folder", ["container", "qgpu-slurm-7"])
def test_another_pod_of_a_jobs_name_gets_nothing_of_the_job(node: Node, folder: str) -> None:
    other = node.job.parent / folder
    other.mkdir()
    with subprocess.Popen(["sleep", "600"]) as process:
        (other / "cgroup.procs").write_text(str(process.pid))
        node.host.admit("slurm-7", {0: Grant(cores=1)}, "/" + str(other.relative_to(cgroup.mount())))
        answer = node.bind(0, gpus="1", shards="50")
        (pod,) = node.host.pods()
        process.kill()

    assert answer["error"] == "pod slurm-7: it is not that of job 7; end its processes first"
    assert pod.grants == {0: Grant(cores=1)}


def test_the_pod_ends_with_the_job(node: Node) -> None:
    node.bind(0, shards="30")
    node.tasks[0].kill()
    node.tasks[0].wait()
    node.requests.reap()

    assert node.host.pods() == []


def test_a_task_that_has_ended_binds_nothing(node: Node) -> None:
    """Whoever has got its pid by then must not come into the pod."""
    with subprocess.Popen(["true"]) as task:
        me = Session(wire.Peer(task.pid, 0, 0), may_change=True, process=os.pidfd_open(task.pid))
        os.waitid(os.P_PID, task.pid, os.WEXITED | os.WNOWAIT)
        with pytest.raises(RefusedError, match="its task has ended"):
            node.requests.handle(me, {"op": "slurm.bind", "job": 7, "gpus": "0"}, [])

    assert node.host.pods() == []


def test_what_is_no_listener_is_refused(node: Node) -> None:
    me = Session(wire.Peer(os.getpid(), 0, 0), may_change=True, process=os.pidfd_open(os.getpid()))
    fds = list(os.pipe())
    with pytest.raises(InvalidValueError, match="no seccomp listener"):
        node.requests.handle(me, {"op": "slurm.bind", "job": 7, "gpus": "0"}, fds)

    assert node.host.pods() == []
    for fd in fds:
        os.close(fd)


def test_user_of_slurm_leaves_a_bounded_number_of_pods(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pod_users, "MOST_LEFT_OF_OWNER", 1)
    monkeypatch.setattr(pod_users, "LEAST_LEFT", 1)
    monkeypatch.setattr(pods, "_LEFT_S", 0.0)
    monkeypatch.setattr(node.host, "names_in_use", lambda: ["slurm-6"])
    node.requests.pods.users.note_owner("slurm-6", "", "user 1234")
    node.requests.pods.users.forget("slurm-6")

    assert "1 ended pods of user 1234" in str(node.bind(0, uid=1234)["error"])
    assert node.bind(0, uid=0)["ok"]
    assert node.bind(0, uid=1234)["ok"], "the job has begun"


def test_memory_that_a_users_jobs_left_is_missing_to_the_next(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """One job after the other would take all of the card, and jobs of others would not fit."""
    card = node.host.pgpus()[0].memory
    monkeypatch.setattr(pods, "_LEFT_S", 0.0)
    monkeypatch.setattr(node.host, "names_in_use", lambda: ["slurm-6"])
    with node.requests.pods.orphaned.ending("slurm-6", "user 1234"):
        monkeypatch.setattr(node.host, "orphaned_memory", lambda: {0: card // 4})

    assert "end those processes first" in str(node.bind(0, uid=1234, shards="25")["error"])
    assert node.bind(0, uid=1234, shards="75")["ok"]
    assert node.host.pods()[0].grants[0].memory == card * 75 // 100 - card // 4
    monkeypatch.setattr(node.host, "orphaned_memory", lambda: {0: card})
    assert node.bind(1, uid=1234, shards="25")["ok"], "the job has begun"
    assert node.host.pods()[0].grants[0].memory == card * 75 // 100 - card // 4


@pytest.fixture
def filtered(node: Node, monkeypatch: pytest.MonkeyPatch) -> Node:
    """Have the node's tasks bound as on plane seccomp."""
    monkeypatch.setitem(node.requests._changing, "slurm.bind", SlurmJobs(node.requests.pods, Plane.SECCOMP).bind)
    return node


def test_device_files_are_of_steps_with_gpus_only(filtered: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step without GPUs has no filter, and lies in the cgroup of the job's pod."""
    kernel = FakeKernel()
    monkeypatch.setattr(filtered.requests._isolation, "_files", kernel)
    filtered.bind(0, shards="30")
    assert kernel.pods == [filtered.path("step_0")]

    filtered.bind(1, shards="30")
    assert sorted(kernel.pods) == [filtered.path("step_0"), filtered.path("step_1")]


def test_steps_that_have_ended_leave_no_file_to_the_job(filtered: Node) -> None:
    filtered.bind(0, shards="30")
    filtered.tasks[0].kill()
    filtered.tasks[0].wait()
    for leaf in ("slurm", "user/task_0", "user", ""):
        (filtered.job / "step_0" / leaf).rmdir()

    assert slurm_steps.places(filtered.path()) == []


def test_job_of_a_daemon_without_notes_stays_one(filtered: Node) -> None:
    with subprocess.Popen(["sleep", "600"]) as process:
        (filtered.job / "step_0/user/task_0/cgroup.procs").write_text(str(process.pid))
        filtered.host.admit("slurm-7", {0: Grant(cores=30)}, filtered.path())
        filtered.bind(1, shards="30")
        process.kill()

    assert slurm_steps.places(filtered.path()) == [filtered.path()]


def test_a_jobs_steps_with_gpus_are_bounded(filtered: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm_steps, "MOST_STEPS", 1)
    assert filtered.bind(0, shards="30")["ok"]
    assert filtered.bind(0, shards="30")["ok"]

    assert "1 steps of this job have GPUs, and no more fit" in str(filtered.bind(1, shards="30")["error"])


def test_a_job_has_half_of_the_places_that_others_leave(filtered: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm_steps, "MOST_PLACES", 4)
    other = filtered.job.parent / "web"
    other.mkdir()
    with subprocess.Popen(["sleep", "600"]) as process:
        (other / "cgroup.procs").write_text(str(process.pid))
        filtered.host.admit("web", {0: Grant()}, "/" + str(other.relative_to(cgroup.mount())))
        answers = [filtered.bind(step, shards="30") for step in (0, 1)]
        process.kill()

    assert answers[0]["ok"]
    assert "1 steps of this job have GPUs, and no more fit" in str(answers[1]["error"])


def test_jobs_of_other_planes_are_not_divided(node: Node) -> None:
    node.bind(0, shards="30")

    assert slurm_steps.places(node.path()) == [node.path()]


def test_next_daemon_knows_owner_of_job_without_own_cgroup(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm's plugin for cgroup version 1 makes none in the version 2 tree, so qgpu makes one."""
    monkeypatch.setattr(node.requests.pods, "_plane", Plane.SECCOMP)
    node.job = node.job.with_name("plain")
    for leaf in ("slurm", "user/task_0"):
        (node.job / "step_0" / leaf).mkdir(parents=True)
    assert node.bind(0, uid=1234)["ok"]
    (pod,) = node.host.pods()

    assert pod.cgroup == node.path("step_0/slurm/qgpu-slurm-7")
    assert pod_users.PodUsers([pod]).owner_of("slurm-7") == "user 1234"
