"""Real slurmctld and slurmds of one Debian release, in namespaces and a chroot, each node with a qgpud of its own.

Nothing of the host changes: packages are unpacked in $QGPU_CACHE, and network, mounts, names and processes are the
cluster's own. All of it ends with the cluster's first process.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
import textwrap
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from qgpu.ipc.control_socket import Client
from qgpu.linux import cgroup
from tests.cli.programs import Daemon

ROOT = Path(__file__).resolve().parents[2]
CACHE = Path(os.environ.get("QGPU_CACHE", Path.home() / ".cache" / "qgpu")) / "slurm"
MIRROR = os.environ.get("QGPU_DEBIAN_MIRROR", "http://deb.debian.org/debian")
#: Debian's releases by the version of Slurm in each.
RELEASES = {"22.05": "bookworm", "24.11": "trixie", "26.05": "forky"}
PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge")
#: A release that is not out yet may carry an old date.
_ANY_DATE = "Acquire::Check-Valid-Until=false"
NODES = ("n1", "n2")
CARDS = 2
#: Whether Slurm's plugin for cgroup version 2 can be had: it refuses a host that has version 1, too.
UNIFIED = cgroup.mount() == Path("/sys/fs/cgroup")
#: Of the cards' files, which no driver serves.
CARD_MAJOR = 240
ADDRESS = "10.213.0.1"
PATIENCE_S = 60.0

SLURM_CONF = f"""
ClusterName=test
SlurmctldHost=control({ADDRESS})
SlurmUser=root
AuthType=auth/munge
CredType=cred/munge
MpiDefault=none
ProctrackType={"proctrack/cgroup" if UNIFIED else "proctrack/linuxproc"}
TaskPlugin={"task/cgroup" if UNIFIED else "task/none"}
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
GresTypes=gpu,shard
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PlugStackConfig=/etc/slurm/plugstack.conf
StateSaveLocation=/var/spool/slurmctld
SlurmdSpoolDir=/var/spool/slurmd.%n
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.%n.pid
SlurmctldLogFile=/work/slurmctld.log
SlurmdLogFile=/work/slurmd.%n.log
SchedulerParameters=bf_interval=1,sched_min_interval=0
ReturnToService=2
KillWait=2
MailProg=/bin/true
"""


class Cluster:
    """A controller and two nodes with two simulated cards each; every card has 100 shards."""

    def __init__(self, version: str) -> None:
        self.version = version
        self.root = root(version)
        self.work = Path(tempfile.mkdtemp(prefix="qgpu-slurm."))
        self.work.chmod(0o755)
        self.daemons: dict[str, Daemon] = {}
        #: The root of the cluster's cgroups.
        self._cgroup = cgroup.mount() / self.work.name
        for name in ("conf", "out", *NODES):
            (self.work / name).mkdir()
        (self.work / "out").chmod(0o777)
        self._first: subprocess.Popen[bytes] | None = None
        try:
            build_plugin(version, self.work / "conf" / "qgpu_spank.so")
            self._write_configuration()
            for node in NODES:
                self.start_qgpud(node)
            self._start()
            self.wait(lambda: self.run("sinfo", "-h", "-o", "%T %D").stdout.split() == ["idle", "2"], "idle nodes")
        except BaseException:
            self.close()
            raise

    def plugstack(self, arguments: str = "", word: str = "required") -> None:
        """Write the plugin's line; slurmstepds read it when they start."""
        line = f"{word} /etc/slurm/qgpu_spank.so {arguments}\n"
        (self.work / "conf/plugstack.conf").write_text(line)

    def start_qgpud(self, node: str, *options: str) -> None:
        """Start the daemon of a node."""
        daemon = Daemon(self.work / node / "run", "--plane", "sim", "--sim-gpus", str(CARDS), *options)
        self.daemons[node] = daemon
        self.wait(lambda: (self.work / node / "run/qgpud.sock").exists(), "qgpud listens")

    def pods(self, node: str = "n1") -> dict[str, Any]:
        """Return the pods of a node by name."""
        with Client(self.work / node / "run") as client:
            return {pod["name"]: pod for pod in client.call("pod.list")["pods"]}

    @staticmethod
    def cgroup(path: str) -> Path:
        """Return where a cgroup is."""
        return cgroup.mount() / path.lstrip("/")

    def popen(self, *command: str, user: str = "nobody", env: dict[str, str] | None = None) -> subprocess.Popen[str]:
        """Start a command on the cluster as a user."""
        return subprocess.Popen(
            [*self._enter(), "chroot", f"--userspec={user}", str(self.root), *command],
            env={"PATH": "/usr/bin:/usr/sbin:/bin", "HOME": "/work/out", "PWD": "/work/out"} | (env or {}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(
        self, *command: str, user: str = "nobody", env: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on the cluster to its end."""
        process = self.popen(*command, user=user, env=env)
        try:
            out, err = process.communicate(timeout=PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            raise AssertionError(f"{command}: still runs; it said {out} {err}; {self.logs()}") from None
        return subprocess.CompletedProcess(command, process.returncode, out, err)

    def batch(self, script: str, *options: str, env: dict[str, str] | None = None) -> str:
        """Submit a batch script; return the job's number."""
        path = self.work / "out" / f"script-{time.monotonic_ns()}"
        path.write_text(f"#!/bin/sh\n{script}\n")
        sent = self.run(
            *("sbatch", "--parsable", "--chdir=/work/out", "--output=/work/out/%j.out"),
            *(*options, f"/work/out/{path.name}"),
            env=env,
        )
        assert sent.returncode == 0, sent.stderr
        return sent.stdout.strip()

    def state(self, job: str) -> str:
        """Return a job's state."""
        shown = self.run("scontrol", "show", "job", "-o", job).stdout
        return next((word[9:] for word in shown.split() if word.startswith("JobState=")), "")

    def reason(self, job: str) -> str:
        """Return why a job waits, as the scheduler found when it last looked."""
        return self.run("squeue", "-h", "-j", job, "-o", "%r").stdout.strip()

    def wait(self, until: Callable[[], bool], what: str) -> None:
        """Wait for an event. Raises AssertionError with the logs if it does not come."""
        deadline = time.monotonic() + PATIENCE_S
        while not until():
            assert time.monotonic() < deadline, f"waited in vain: {what}\n{self.logs()}"
            time.sleep(0.05)

    def clear(self) -> None:
        """End all jobs; return when no pod is left."""
        jobs = self.run("squeue", "-h", "-o", "%A").stdout.split()
        if jobs:
            self.run("scancel", *jobs, user="root")
        self.wait(lambda: not self.run("squeue", "-h").stdout, "no job is left")
        self.wait(lambda: not any(self.pods(node) for node in NODES), "no pod is left")

    def logs(self) -> str:
        """Return the ends of all logs."""
        ends = {path.name: path.read_text(errors="replace")[-2000:] for path in sorted(self.work.glob("*.log"))}
        return "\n".join(f"== {name}\n{end}" for name, end in ends.items())

    def restart_slurmd(self, node: str) -> None:
        """Kill a node's slurmd and start it again; its steps run on."""
        pid = int(self.run("cat", f"/run/slurmd.{node}.pid", user="root").stdout)
        self.run("kill", "-9", str(pid), user="root")
        self.slurmd(node)

    def slurmd(self, node: str) -> None:
        """Start a node's slurmd, which sees its own qgpud's directory at /run/qgpu."""
        inner = f"hostname {node}; mount --bind {self.root}/work/{node}/run {self.root}/run/qgpu; "
        if UNIFIED:  # alone in a cgroup: 24.11 moves all that are with it, and fails on those of other PID namespaces
            inner += f"echo 0 > $(mktemp -d /sys/fs/cgroup/{node}.XXXXXX)/cgroup.procs; "
        inner += f"exec chroot {self.root} slurmd -N {node}"
        started = subprocess.run([*self._enter(), "unshare", "-m", "-u", "sh", "-ec", inner], check=False)
        assert started.returncode == 0, self.logs()

    def close(self) -> None:
        """End everything."""
        if self._first is not None:
            self._first.kill()  # and with it the PID namespace
            self._first.wait()
        for daemon in self.daemons.values():
            if daemon.process.poll() is None:
                daemon.stop()
        if self._cgroup.exists():
            self.wait(lambda: "populated 0" in (self._cgroup / "cgroup.events").read_text(), "the cluster has ended")
            cgroup.remove("", f"/{self._cgroup.name}")
        shutil.rmtree(self.work)

    def _write_configuration(self) -> None:
        conf = self.work / "conf"
        nodes = "".join(
            f"NodeName={node} NodeAddr={ADDRESS} NodeHostname={node} Port={17001 + at} CPUs=16 RealMemory=1000"
            f" Gres=gpu:{CARDS},shard:{100 * CARDS}\n"
            for at, node in enumerate(NODES)
        )
        parts = "".join(
            f"PartitionName={name} Nodes=ALL MaxTime=INFINITE State=UP PriorityTier={tier} Default={default}\n"
            for name, tier, default in (("low", 1, "YES"), ("high", 2, "NO"))
        )
        (conf / "slurm.conf").write_text(SLURM_CONF + nodes + parts)
        (conf / "gres.conf").write_text(
            "".join(
                f"Name=gpu File=/dev/card{card}\nName=shard Count=100 File=/dev/card{card}\n" for card in range(CARDS)
            )
        )
        (conf / "cgroup.conf").write_text(
            "CgroupPlugin=cgroup/v2\nIgnoreSystemd=yes\nConstrainDevices=yes\n"
            if UNIFIED
            else "CgroupPlugin=cgroup/v1\n"
        )
        (self.work / "hosts").write_text(f"127.0.0.1 localhost\n{ADDRESS} control {' '.join(NODES)}\n")
        self.plugstack()

    def _start(self) -> None:
        """Start the cluster's first process; return when all daemons run."""
        there = str(self.root)
        # not in the chroot only: slurmd asks /proc/1/mountinfo for the root of this mount
        unified = "umount /sys/fs/cgroup; mount -t cgroup2 none /sys/fs/cgroup" if UNIFIED else ""
        script = f"""
            mount --make-rprivate /
            {unified}
            hostname control
            ip link set lo up
            ip addr add {ADDRESS}/24 dev lo
            for each in run tmp var/log var/spool var/lib/slurm etc/slurm dev; do
                mkdir -p {there}/$each; mount -t tmpfs -o mode=755 tmpfs {there}/$each
            done
            chmod 1777 {there}/tmp
            mkdir -p {there}/work {there}/run/qgpu {there}/run/munge {there}/var/log/munge {there}/var/lib/munge
            mkdir -p {there}/dev/shm {there}/dev/pts {there}/var/spool/slurmctld
            mount --bind {self.work} {there}/work
            mount --bind {self.work}/conf {there}/etc/slurm
            touch {there}/etc/hosts; mount --bind {self.work}/hosts {there}/etc/hosts
            mount -t proc proc {there}/proc
            mount --rbind /sys {there}/sys
            mknod -m 666 {there}/dev/null c 1 3; mknod -m 666 {there}/dev/zero c 1 5
            mknod -m 666 {there}/dev/random c 1 8; mknod -m 666 {there}/dev/urandom c 1 9
            for card in $(seq 0 {CARDS - 1}); do mknod -m 666 {there}/dev/card$card c {CARD_MAJOR} $card; done
            chown munge: {there}/run/munge {there}/var/log/munge {there}/var/lib/munge 2>/dev/null ||
                chroot {there} chown munge: /run/munge /var/log/munge /var/lib/munge
            chroot --userspec=munge {there} munged
            chroot {there} slurmctld
            touch {self.work}/begun
            while true; do sleep infinity & wait $!; done
        """
        self._make_cgroups()
        # a cgroup namespace whose root is the cluster's, then the others, in the leaf
        unshare = [*_in_cgroup(self._cgroup), "unshare", "-C", *_in_cgroup(self._cgroup / "all")]
        unshare += ["unshare", "-m", "-n", "-u", "-i", "-p", "--fork", "--kill-child"]
        self._first = first = subprocess.Popen(
            [*unshare, "bash", "-ec", textwrap.dedent(script)],
            stdin=subprocess.DEVNULL,
            stdout=(self.work / "init.log").open("w"),
            stderr=subprocess.STDOUT,
        )
        self.wait(lambda: (self.work / "begun").exists() or first.poll() is not None, "the cluster's daemons")
        assert first.poll() is None, self.logs()
        if self.version != "22.05":  # its slurmstepd enters the cluster's root at its end, which then refuses processes
            self._enable_controllers()
        for node in NODES:
            self.slurmd(node)

    def _make_cgroups(self) -> None:
        """Make the cluster's root, a leaf for its processes, and what Slurm expects systemd to have made."""
        for name in ("all", "system.slice"):
            (self._cgroup / name).mkdir(parents=True)

    def _enable_controllers(self) -> None:
        """Let the cluster's cgroups have the host's controllers, if it has any for them."""
        there = {"cpuset", "cpu", "memory"} & {*(self._cgroup / "cgroup.controllers").read_text().split()}
        (self._cgroup / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in sorted(there)))

    def _enter(self) -> Sequence[str]:
        assert self._first is not None
        first = Path(f"/proc/{self._first.pid}/task/{self._first.pid}/children").read_text().split()
        return [*_in_cgroup(self._cgroup / "all"), "nsenter", "-t", first[0], "-m", "-n", "-u", "-i", "-p", "-C", "--"]


def _in_cgroup(directory: Path) -> list[str]:
    """Return the beginning of a command that runs the rest in a cgroup."""
    return ["sh", "-c", f'echo $$ > {directory}/cgroup.procs && exec "$@"', "sh"]


def root(version: str) -> Path:
    """Return the unpacked packages of a version, fetched if they are not in the cache."""
    there = CACHE / version
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / f"{version}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (there / "done").exists():
            shutil.rmtree(there, ignore_errors=True)
            making = ["mmdebstrap", "--quiet", "--variant=minbase", f"--include={','.join(PACKAGES)}"]
            making += [f"--aptopt={_ANY_DATE.replace('=', ' ')}", RELEASES[version], str(there), MIRROR]
            subprocess.run(making, check=True)
            _headers(version, there)
            (there / "done").touch()
    return there


def _headers(version: str, there: Path) -> None:
    """Unpack libslurm-dev into a root, without what it depends on."""
    shutil.copy("/etc/resolv.conf", there / "etc/resolv.conf")
    apt = f"apt-get -qq -o{_ANY_DATE} -oAPT::Sandbox::User=root"
    script = f"cd /tmp; {apt} update; {apt} download libslurm-dev"
    subprocess.run(["chroot", str(there), "sh", "-ec", script], check=True)
    (deb,) = (there / "tmp").glob("libslurm-dev_*.deb")
    subprocess.run(["dpkg", "-x", str(deb), str(there)], check=True)
    deb.unlink()
    shutil.rmtree(there / "var/lib/apt/lists")


def build_plugin(version: str, into: Path) -> None:
    """Compile the plugin against a version's headers, as an administrator does."""
    with tempfile.TemporaryDirectory() as work:
        shutil.copytree(ROOT / "packaging/slurm", work, dirs_exist_ok=True)
        include = root(version) / "usr/include"
        options = [f"SLURM_INCLUDE={include}", "CFLAGS=-O2 -Wall -Wextra -Werror"]
        subprocess.run(["make", "-s", "-C", work, *options], check=True)
        shutil.copy(Path(work) / "qgpu_spank.so", into)
