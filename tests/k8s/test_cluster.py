"""The API server's answers in a process of many threads."""

from __future__ import annotations

import subprocess
import sys

#: Threads that decode their first answers at the same time, as after an API server's return.
CROWD = """
import sys, threading
from lightkube.core import decoders
from qgpu.k8s.cluster import Node, ResourceClaim, ResourceSlice

sys.setswitchinterval(1e-6)
POOL = b'{"spec": {"driver": "a", "pool": {"name": "a", "generation": 1, "resourceSliceCount": 1}, "devices": []}}'
ANSWERS = (Node, b'{"spec": {"taints": []}}'), (ResourceSlice, POOL), (ResourceClaim, b'{"spec": {"devices": {}}}')
together = threading.Barrier(9)

def decode(kind, data):
    together.wait()
    decoders.decode_object(data, kind)
    decoders.decode_list(b'{"metadata": {}, "items": [' + data + b"]}", kind)

threads = [threading.Thread(target=decode, args=answer) for answer in ANSWERS * 3]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


def test_threads_that_decode_first_answers_at_once_go_on():
    ends = [subprocess.run([sys.executable, "-c", CROWD], check=False).returncode for _ in range(5)]

    assert ends == [0] * 5
