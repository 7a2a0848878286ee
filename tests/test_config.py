"""The configuration file: taken whole, or one line that says what to mend."""

from __future__ import annotations

from pathlib import Path

import pytest

from qgpu import config
from qgpu.config import Config, GpuSettings, LogFormat, LogLevel, Metrics, MetricsCompat
from qgpu.errors import ConfigError
from qgpu.ipc.http_server import Address
from qgpu.model import ContainerPolicy, PodClass, RequestBounds
from qgpu.model.plane_names import Plane


def load(tmp_path: Path, text: str) -> Config:
    """Load a configuration of this text."""
    path = tmp_path / "qgpu.toml"
    path.write_text(text)
    return config.load(path)


def test_an_empty_file_is_the_default_configuration(tmp_path: Path) -> None:
    assert load(tmp_path, "") == Config()


def test_every_key_is_taken(tmp_path: Path) -> None:
    text = """
        plane = "sim"
        suspended_memory = "64GiB"
        [socket]
        mode = "0600"
        group = "root"
        [log]
        level = "debug"
        format = "json"
        [metrics]
        listen = "127.0.0.1:9835"
        compat = "hami"
        [defaults]
        policy = "fixed-share"
        period = "50ms"
        offline_floor = "10%"
        memory_overcommit = "2.5"
        [gpu.1]
        policy = "0"
        online_policy = "burst-share"
        [containers]
        cdi = "/etc/cdi"
    """

    expected = Config(
        plane=Plane.SIM,
        suspended_memory=64 << 30,
        socket_mode=0o600,
        socket_gid=0,
        log_level=LogLevel.DEBUG,
        log_format=LogFormat.JSON,
        metrics=Metrics(Address("127.0.0.1", 9835), MetricsCompat.HAMI),
        cdi="/etc/cdi",
        defaults=GpuSettings("fixed-share", "best-effort", 50_000_000, 10, 2.5),
        gpus={1: GpuSettings("best-effort", "burst-share", 50_000_000, 10, 2.5)},
    )
    assert load(tmp_path, text) == expected


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("plane =", "not TOML"),
        (f"plane = {'[' * 5000}", "not TOML"),
        ('[metrics]\nlisten = "unix:/\\u0000"', "metrics.listen: write it without a zero byte"),
        (f"[gpu.{'9' * 5000}]", f"gpu.{'9' * 5000}: a pGPU is named by its number"),
        ("[gpu.00]\n[gpu.0]", "gpu.00: a pGPU is named by its number"),
        ('planes = "sim"', "planes: no such key; known here: plane, device_files, suspended_memory, "),
        (
            '[gpu.0]\nmemory_overcommit = "0.5"',
            "gpu.0.memory_overcommit: memory overcommit 0.5: a pGPU's memory is granted 1 to 8 times",
        ),
        ('[gpu.0]\nmemory_overcommit = "twice"', "gpu.0.memory_overcommit: 'twice' is not a factor such as 2.0"),
        ('plane = "cuda"', "plane: 'cuda': choose one of auto, kmod, seccomp, sim"),
        (
            '[metrics]\nlisten = "9835"',
            "metrics.listen: '9835': write an IP address or localhost, and a port, as in 127.0.0.1:9835",
        ),
        ('[metrics]\nlisten = "host:80"', "metrics.listen: 'host:80': write an IP address"),
        ('[metrics]\nlisten = "127.0.0.1:70000"', "metrics.listen: '127.0.0.1:70000': write an IP address"),
        ('[metrics]\ncompat = "dcgm"', "metrics.compat: 'dcgm': choose one of none, hami"),
        ('[containers]\ncdi = "cdi"', "containers.cdi: 'cdi': write auto, off, or a directory such as /run/cdi"),
        ("plane = 3", "plane: write it as a string, not as 3"),
        ("socket = 3", "socket: must be a table"),
        ('[socket]\nmode = "rw"', "socket.mode: 'rw': write file permissions in octal"),
        ('[socket]\nmode = "7777"', "socket.mode: '7777': write file permissions in octal"),
        ('[socket]\ngroup = "no-such-group"', "socket.group: 'no-such-group': there is no such group"),
        ('[log]\nlevel = "loud"', "log.level: 'loud': choose one of debug, info, warning, error"),
        ('[defaults]\npolicy = "fair"', "defaults.policy: policy 'fair': there is no such policy"),
        ('[defaults]\nperiod = "1ms"', "defaults.period: period 1 ms: a period is 10 ms to 10 s"),
        ('[defaults]\nperiod = "soon"', "defaults.period: 'soon' is not a time such as 100ms"),
        ("[defaults]\nperiod = 100", "defaults.period: write it as a string"),
        ('[gpu.first]\npolicy = "0"', "gpu.first: a pGPU is named by its number"),
        ('[gpu.0]\nmig = "yes"', "gpu.0.mig: 'yes': write leave, or share for the instances of a card in MIG mode"),
        ('[defaults]\nmig = "share"', "defaults.mig: no such key; known here: policy, online_policy, period"),
        ('[gpu.0]\npolice = "0"', "gpu.0.police: no such key; known here: policy, online_policy, period"),
        ('gpu = "0"', "gpu: must be a table"),
    ],
)
def test_a_mistake_is_one_line_with_file_key_and_remedy(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)

    line = str(caught.value)
    assert line.startswith(f"{tmp_path / 'qgpu.toml'}: {complaint}")
    assert "\n" not in line


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing: No such file"):
        config.load(tmp_path / "nothing")


def test_administrator_bounds_what_containers_may_request(tmp_path: Path) -> None:
    assert load(tmp_path, "").containers == ContainerPolicy()
    found = load(
        tmp_path,
        "[containers]\nclasses = 'offline'\nmax_cores = '60%'\nmax_memory = '8GiB'\n"
        "[containers.environment]\nclasses = 'offline, online'\nmax_cores = '30%'\nnames = 'yes'\n",
    ).containers

    assert found.from_anywhere == RequestBounds(frozenset({PodClass.OFFLINE}), 60, 8 << 30)
    assert found.by_environment == RequestBounds(frozenset(PodClass), 30, None, name=True)


def test_variables_need_not_be_heard(tmp_path: Path) -> None:
    assert load(tmp_path, "[containers.environment]\nenabled = 'no'\n").containers.by_environment is None


@pytest.mark.parametrize(
    "text",
    [
        *("max_cores = '200%'", "classes = 'fast'", "max_memory = 'much'", "max_memory = '16'"),
        *("names = 'no'", "environment.enabled = '1'"),
    ],
)
def test_a_policy_that_is_none_is_refused_with_its_key(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=text.split(" ")[0].rpartition(".")[2]):
        load(tmp_path, f"[containers]\n{text}\n")


def test_instances_are_shared_of_the_cards_that_say_so(tmp_path: Path) -> None:
    text = '[gpu.0]\nmig = "share"\n[gpu.1]\nmig = "leave"\n[gpu.GPU-5a7c]\nmig = "share"\n'
    config = load(tmp_path, text + '[gpu.101]\npolicy = "fixed-share"\n[gpu.MIG-11]\npolicy = "best-effort"\n')

    assert config.mig == {0, "GPU-5a7c"}
    assert config.gpu(101, "MIG-10").policy == "fixed-share"
    assert config.gpu(102, "MIG-11").policy == "best-effort"


def test_a_table_for_a_uuid_comes_before_one_for_a_number(tmp_path: Path) -> None:
    config = load(tmp_path, '[gpu.0]\npolicy = "fixed-share"\n[gpu.GPU-5a7c-11]\npolicy = "best-effort"\n')

    assert config.gpu(0, "GPU-5a7c-11").policy == "best-effort"
    assert config.gpu(0, "GPU-other").policy == "fixed-share"
    assert config.gpu(1, "GPU-other") == config.defaults
