"""The pods' filter in a runtime's words: what is watched is asked about, everything else is as it was."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from qgpu.errors import InvalidValueError, RefusedError
from qgpu.guardian.proxy.seccomp_filter import WATCHED_PREFIXES
from qgpu.runtime import seccomp_profile
from qgpu.runtime.oci_container import Container
from tests.cli import programs

SOCKET = Path("/run/qgpu/seccomp.sock")
STRICT = {
    "defaultAction": "SCMP_ACT_ERRNO",
    "archMap": [{"architecture": "SCMP_ARCH_X86_64", "subArchitectures": ["SCMP_ARCH_X86"]}],
    "syscalls": [
        {"names": ["read", "ioctl", "write"], "action": "SCMP_ACT_ALLOW", "args": [], "includes": {}},
        {"name": "ioctl", "action": "SCMP_ACT_ALLOW"},
        {"names": ["mmap", "mmap2"], "action": "SCMP_ACT_ALLOW"},
        {"names": ["reboot"], "action": "SCMP_ACT_ALLOW", "includes": {"caps": ["CAP_SYS_BOOT"]}},
    ],
}
BASES = pytest.mark.parametrize("base", [STRICT, seccomp_profile.UNCONFINED], ids=["strict", "unconfined"])


def holds(comparison, arguments):
    value = arguments[comparison["index"]]
    match comparison["op"]:
        case "SCMP_CMP_MASKED_EQ":
            return value & comparison["value"] == comparison["valueTwo"]
        case "SCMP_CMP_EQ":
            return value == comparison["value"]
        case "SCMP_CMP_NE":
            return value != comparison["value"]
    raise AssertionError(comparison)


def verdict(profile, call, arguments):
    """What becomes of a call, as libseccomp reads the rules."""
    matching = {
        rule["action"]
        for rule in profile["syscalls"]
        if call in rule["names"] and all(holds(arg, arguments) for arg in rule["args"])
    }
    assert len(matching) < 2, "rules that contradict each other"
    return matching.pop() if matching else profile["defaultAction"]


def container(section):
    return Container("web", 7, seccomp=section)


@BASES
def test_watched_ioctls_ask_and_all_others_pass(base):
    profile = seccomp_profile.profile(base, SOCKET)

    for number in (*range(1 << 12), 0x30000001, 0x30000002, 0x5401, 0xC0204627):
        watched = any(number & mask == value for mask, value in WATCHED_PREFIXES)
        assert verdict(profile, "ioctl", {1: number}) == ("SCMP_ACT_NOTIFY" if watched else "SCMP_ACT_ALLOW")
    assert verdict(profile, "ioctl", {1: 0x30000001}) == "SCMP_ACT_NOTIFY"
    assert verdict(profile, "ioctl", {1: 0x5401}) == "SCMP_ACT_ALLOW"


@BASES
@pytest.mark.parametrize("protection", range(8))
@pytest.mark.parametrize("flags", [0x01, 0x02, 0x03, 0x11, 0x13, 0x21, 0x22, 0x31, 0x100001, 0x100011, 0x100021])
def test_only_mappings_that_could_be_managed_memory_ask(base, protection, flags):
    profile = seccomp_profile.profile(base, SOCKET)

    for address, offset in ((0, 0), (1 << 12, 0), (1 << 40, 0), (0, 1 << 12), (0, 1 << 40), (1 << 12, 1 << 12)):
        at_its_address = offset != 0 or (address == 0 and flags & 0x100010)
        managed = protection & 3 == 3 and flags & 0x21 == 0x01 and at_its_address
        assert verdict(profile, "mmap", {0: address, 2: protection, 3: flags, 5: offset}) == (
            "SCMP_ACT_NOTIFY" if managed else "SCMP_ACT_ALLOW"
        )


def test_the_rest_of_the_base_stays_as_it_is():
    profile = seccomp_profile.profile(STRICT, SOCKET)

    assert profile["syscalls"][0] == {**STRICT["syscalls"][0], "names": ["read", "write"]}
    assert profile["syscalls"][1] == {**STRICT["syscalls"][2], "names": ["mmap2"]}
    assert profile["syscalls"][2] == STRICT["syscalls"][3]
    assert "ioctl" in STRICT["syscalls"][0]["names"]


@BASES
def test_only_the_machines_own_architecture_is_listed(base):
    profile = seccomp_profile.profile(base, SOCKET)

    assert profile["architectures"] == [
        {"x86_64": "SCMP_ARCH_X86_64", "aarch64": "SCMP_ARCH_AARCH64"}[os.uname().machine]
    ]
    assert "archMap" not in profile


@pytest.mark.parametrize(
    "base",
    [
        {"listenerPath": "/run/other.sock"},
        {"syscalls": [{"names": ["ioctl"], "action": "SCMP_ACT_ALLOW", "args": [{"index": 1, "value": 1}]}]},
        {"syscalls": [{"names": ["ioctl"], "action": "SCMP_ACT_ERRNO"}]},
        {"syscalls": [{"names": ["read"], "name": "mmap", "action": "SCMP_ACT_LOG"}]},
        {"syscalls": [{"names": ["openat"], "action": "SCMP_ACT_NOTIFY"}]},
        {"defaultAction": "SCMP_ACT_NOTIFY"},
    ],
)
def test_a_base_that_would_be_changed_in_its_meaning_is_refused(base):
    with pytest.raises(InvalidValueError):
        seccomp_profile.profile(base, SOCKET)


@BASES
def test_profile_section_is_accepted_in_any_order(base):
    section = seccomp_profile.profile(base, SOCKET)
    section["syscalls"] = [{**rule, "errnoRet": None} for rule in reversed(section["syscalls"])]
    for arg in (arg for rule in section["syscalls"] for arg in rule.get("args") or () if not arg["valueTwo"]):
        del arg["valueTwo"]  # as podman does with a zero

    seccomp_profile.check(container(section), SOCKET)


HARMS = (
    "rules by a name that runtimes do not read",
    "32-bit calls",
    "x32 calls alone",
    "other calls ask",
    "all calls ask",
)


@BASES
@pytest.mark.parametrize(
    "harm", ["no listener", "another listener", "one rule less", "one rule more", "no rule", *HARMS]
)
def test_a_section_that_lets_calls_past_is_refused(base, harm):
    section = seccomp_profile.profile(base, SOCKET)
    rules = section["syscalls"]
    match harm:
        case "no listener":
            del section["listenerPath"]
        case "another listener":
            section["listenerPath"] = "/run/other.sock"
        case "one rule less":
            rules.remove(next(rule for rule in rules if rule["action"] == "SCMP_ACT_NOTIFY"))
        case "one rule more":
            rules.append({"names": ["ioctl"], "action": "SCMP_ACT_ALLOW"})
        case "no rule":
            section["syscalls"] = []
        case "rules by a name that runtimes do not read":
            section["syscalls"] = [{**rule, "names": [], "name": rule["names"][0]} for rule in rules]
        case "32-bit calls":
            section["architectures"].append("SCMP_ARCH_X86")
        case "x32 calls alone":
            section["architectures"] = ["SCMP_ARCH_X32"]
        case "other calls ask":
            rules.append({"names": ["openat"], "action": "SCMP_ACT_NOTIFY"})
        case "all calls ask":
            section["defaultAction"] = "SCMP_ACT_NOTIFY"

    with pytest.raises(RefusedError, match="qgpuctl cdi profile"):
        seccomp_profile.check(container(section), SOCKET)


def test_a_container_with_no_section_is_refused():
    with pytest.raises(RefusedError):
        seccomp_profile.check(container({}), SOCKET)


def test_the_profile_is_printed_for_the_daemons_socket(tmp_path):
    (tmp_path / "base.json").write_text(json.dumps(STRICT))
    printed = programs.qgpuctl(tmp_path, "cdi", "profile", "--base", str(tmp_path / "base.json"))

    assert json.loads(printed.stdout) == seccomp_profile.profile(STRICT, tmp_path / "seccomp.sock")


@pytest.mark.parametrize("base", ["nothing.json", "list.json", "text.json"])
def test_a_base_that_is_none_is_refused(tmp_path, base):
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "text.json").write_text("x")
    printed = programs.qgpuctl(tmp_path, "cdi", "profile", "--base", str(tmp_path / base))

    assert (printed.returncode, printed.stdout) == (2, "")
    assert base in printed.stderr
