"""Groups as an operator uses them, on the simulator, where a group has no MPS server."""

from __future__ import annotations

import grp
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import click
import pytest

from qgpu.cli.context import Context
from qgpu.cli.group import remove, set_
from qgpu.errors import ExitCode, QgpuError
from qgpu.groups import keeper_process
from qgpu.groups.group_files import GroupFiles
from qgpu.model.member_limits import MemberLimits
from tests.cli.programs import Daemon, daemon

NOBODY = 65534


@pytest.fixture
def host(tmp_path):
    with daemon(tmp_path / "run") as running:
        yield running
        running.ctl("group", "remove", "llm", "--force")


def groups(host: Daemon) -> list[dict]:
    return host.json("group", "list")["groups"]


def test_members_of_a_group_share_its_grant(host):
    assert host.ctl("group", "create", "llm", "--cores", "60", "--memory", "40GiB", "--allow-graphics").returncode == 0
    member = host.start("run", "--group", "llm", "--", "sleep", "60")
    try:
        while not (found := groups(host)) or not found[0]["members"]:
            assert member.poll() is None
        assert [(grant["cores"], grant["memory"], grant["graphics"]) for grant in found[0]["grants"]] == [
            (60, 40 << 30, True)
        ]
        assert [pod["name"] for pod in host.json("pod", "list")["pods"]] == ["llm"]
    finally:
        member.terminate()
        member.communicate(timeout=60)


def test_member_ends_with_its_commands_exit_code(host):
    host.ctl("group", "create", "llm")

    assert host.ctl("run", "--group", "llm", "--", "sh", "-c", "exit 7").returncode == 7


def test_member_finds_the_mps_server_in_its_environment(host):
    host.ctl("group", "create", "llm")
    shown = host.ctl("run", "--group", "llm", "--sm", "50", "--memory", "16GiB", "--", "env").stdout
    variables = dict(line.partition("=")[::2] for line in shown.splitlines())

    assert variables["CUDA_MPS_PIPE_DIRECTORY"] == str(host.runtime_dir / "groups" / "llm" / "pipe")
    assert variables["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "50"
    assert variables["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=16384M"


def test_group_with_members_is_not_removed_without_force(host):
    host.ctl("group", "create", "llm")
    member = host.start("run", "--group", "llm", "--", "sleep", "60")
    try:
        while not groups(host)[0]["members"]:
            assert member.poll() is None
        refused = host.ctl("group", "remove", "llm")
    finally:
        member.terminate()
        member.communicate(timeout=60)

    assert (refused.returncode, "1 process of a member" in refused.stderr) == (21, True)


def test_removed_group_leaves_nothing(host):
    assert host.ctl("group", "create", "llm").stdout == "group llm: made on pGPU 0\n"
    assert host.ctl("group", "remove", "llm").returncode == 0

    assert (groups(host), host.json("pod", "list")["pods"]) == ([], [])
    assert not GroupFiles(host.runtime_dir, "llm").directory.exists()


def as_nobody(host: Daemon, command: click.Command, **arguments: object) -> int:
    """Run a command of qgpuctl's as another user, and return its exit code."""
    if (child := os.fork()) == 0:
        try:
            os.chdir(host.runtime_dir)  # the way there need not be open to everybody
            os.setgroups(())
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            with click.Context(command, obj=Context(Path(), 60)) as context:
                context.invoke(command, **arguments)
        except QgpuError as error:
            os._exit(error.code)
        finally:
            os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.skipif(os.geteuid() != 0, reason="takes root to become another user")
def test_group_of_another_user_is_not_removed(host):
    host.ctl("group", "create", "llm")

    assert as_nobody(host, remove, name="llm", force=False) == ExitCode.NO_PERMISSION
    assert len(groups(host)) == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="takes root to become another user")
def test_member_of_the_socket_group_sets_no_half_of_a_group(tmp_path):
    (tmp_path / "qgpud.toml").write_text(f'[socket]\ngroup = "{grp.getgrgid(NOBODY).gr_name}"\n')
    with daemon(tmp_path / "run", "--config", str(tmp_path / "qgpud.toml")) as host:
        host.ctl("group", "create", "llm", "--cores", "60")
        code = as_nobody(host, set_, name="llm", quota=30, sm=25, member_memory=None)
        (grant,) = groups(host)[0]["grants"]
        host.ctl("group", "remove", "llm", "--force")

    assert (code, grant["cores"]) == (ExitCode.NO_PERMISSION, 60)


@pytest.mark.parametrize(
    ("arguments", "code", "line"),
    [
        (("run", "--group", "nobody", "--", "true"), 6, "group nobody: there is no such group"),
        (("group", "remove", "nobody"), 6, "group nobody: there is no such group"),
        (("run", "--group", "llm", "--cores", "5", "--", "true"), 2, "--cores is the group's"),
        (("run", "--sm", "50", "--", "true"), 2, "--sm is a member's part of a group"),
        (("run", "--group", "llm", "--sm", "101", "--", "true"), 2, "a part of the SMs is 1 to 100 per cent"),
        (("group", "create", "llm"), 21, "pod name llm: a group has it; choose another"),
        (("group", "create", "claim-a.b"), 21, "group claim-a.b: claims' groups have such names; choose another"),
        (("group", "create", "big", "--cores", "101"), 2, "101"),
        (("group", "create", "big", "--sm", "0"), 2, "a part of the SMs is 1 to 100 per cent"),
        (("group", "set", "llm"), 2, "group set: nothing to set"),
        (("group", "set", "llm", "--sm", "101"), 2, "a part of the SMs is 1 to 100 per cent"),
        (("group", "set", "nobody", "--sm", "50"), 6, "group nobody: there is no such group"),
        (("group", "show", "nobody"), 6, "group nobody: there is no such group"),
        (("pod", "suspend", "llm"), 21, "pod llm: it is a group"),
        (("pod", "move", "llm", "--gpu", "1"), 21, "pod llm: it is a group"),
        (("run", "--name", "llm", "--", "true"), 21, "pod name llm: a group has it"),
    ],
)
def test_what_cannot_be_done_is_refused_in_one_line(host, arguments, code, line):
    host.ctl("group", "create", "llm")
    ended = host.ctl(*arguments)

    assert (ended.returncode, line in ended.stderr, len(ended.stderr.splitlines())) == (code, True, 1)
    assert [each["name"] for each in groups(host)] == ["llm"]


def test_group_outlives_a_daemon_that_restarts(host, tmp_path):
    host.ctl("group", "create", "llm", "--cores", "60")
    found = json.loads(host.ctl("group", "list", "-o", "json").stdout)["groups"]

    assert [group["name"] for group in found] == ["llm"]


def test_group_set_changes_the_grant_and_what_later_members_get(host):
    host.ctl("group", "create", "llm", "--cores", "60", "--sm", "50", "--member-memory", "4GiB")
    said = host.ctl("group", "set", "llm", "--cores", "30", "--class", "online", "--sm", "25").stdout
    shown = host.ctl("run", "--group", "llm", "--", "env").stdout
    own = host.ctl("run", "--group", "llm", "--sm", "75", "--", "env").stdout

    assert "quota 60 % -> 30 %" in said
    (grant,) = groups(host)[0]["grants"]
    assert (grant["cores"], grant["class"]) == (30, "online")
    assert "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=25\n" in shown
    assert "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=4096M\n" in shown
    assert "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=75\n" in own


def test_what_later_members_get_is_told_and_recorded(host):
    host.ctl("group", "create", "llm", "--sm", "50")
    said = host.ctl("group", "set", "llm", "--sm", "25", "--member-memory", "4GiB").stdout
    same = host.ctl("group", "set", "llm", "--sm", "25").stdout
    table = host.ctl("events", "--settings").stdout
    (event,) = host.json("events", "--settings")["events"]

    change = "later members' SMs 50 % -> 25 %, later members' limit none -> 4 GiB"
    assert said.startswith(f"group llm: {change}; by ")
    assert same.startswith("group llm: no change; by ")
    assert (event["what"], event["name"], event["by"]["uid"]) == ("group set", "llm", os.getuid())
    assert change in table


def test_change_of_a_group_that_cannot_be_recorded_is_not_made(tmp_path):
    with daemon(tmp_path / "run", "--state-dir", str(tmp_path / "state")) as host:
        host.ctl("group", "create", "llm", "--sm", "50")
        (tmp_path / "state" / "events.jsonl").symlink_to("/dev/full")
        refused = host.ctl("group", "set", "llm", "--sm", "25")
        left = GroupFiles(host.runtime_dir, "llm").part
        host.ctl("group", "remove", "llm", "--force")

    assert (refused.returncode, "nothing was changed" in refused.stderr) == (ExitCode.FAILED, True)
    assert left == MemberLimits(50, None)


def test_refused_grant_leaves_the_members_part_as_it_was(host):
    host.ctl("group", "create", "llm", "--sm", "50")
    refused = host.ctl("group", "set", "llm", "--memory", "9000GiB", "--sm", "25")

    assert refused.returncode == 21
    assert GroupFiles(host.runtime_dir, "llm").part == MemberLimits(50, None)


def test_group_whose_keeper_was_killed_is_removed(host):
    host.ctl("group", "create", "llm", "--cores", "60")
    keeper = GroupFiles(host.runtime_dir, "llm").need_keeper()
    os.kill(keeper, signal.SIGKILL)
    while GroupFiles(host.runtime_dir, "llm").keeper() is not None:
        time.sleep(0.01)

    assert host.ctl("group", "remove", "llm").returncode == 0
    assert not GroupFiles(host.runtime_dir, "llm").directory.exists()
    assert host.ctl("group", "create", "llm").returncode == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="takes root to become another user")
def test_what_a_killed_keeper_has_left_is_its_owners_to_remove(host):
    host.ctl("group", "create", "llm")
    os.kill(GroupFiles(host.runtime_dir, "llm").need_keeper(), signal.SIGKILL)
    while GroupFiles(host.runtime_dir, "llm").keeper() is not None:
        time.sleep(0.01)

    assert as_nobody(host, remove, name="llm", force=False) == ExitCode.NO_PERMISSION
    assert GroupFiles(host.runtime_dir, "llm").directory.exists()


def test_group_whose_creator_was_interrupted_leaves_nothing(host):
    ready, told = os.pipe()
    os.close(ready)
    wanted = {"grants": {"0": {"class": "offline"}}, "part": {"sm": None, "memory": None}, "of_claim": False}
    keeper = subprocess.run(
        [*keeper_process.PROGRAM, "llm", str(told)],
        input=json.dumps(wanted).encode(),
        env=os.environ | {"QGPU_RUNTIME_DIR": str(host.runtime_dir)},
        pass_fds=(told,),
        check=False,
        capture_output=True,
    )
    os.close(told)

    assert (keeper.returncode, keeper.stderr) == (ExitCode.FAILED, b"")
    assert not GroupFiles(host.runtime_dir, "llm").directory.exists()
    assert host.json("pod", "list")["pods"] == []


def test_path_in_place_of_a_groups_name_removes_nothing(host):
    (host.runtime_dir / "groups").mkdir()
    refused = host.ctl("group", "remove", "..", "--force")

    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert host.runtime_dir.is_dir()
    assert groups(host) == []


def test_groups_directories_are_its_owners_whatever_the_umask(host):
    before = os.umask(0)
    try:
        host.ctl("group", "create", "llm")
    finally:
        os.umask(before)
    directory = host.runtime_dir / "groups" / "llm"

    assert [each for each in (directory, directory / "pipe") if each.stat().st_mode & 0o022] == []
