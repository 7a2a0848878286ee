"""Fetches what the tests on containerd need into the cache, for a place without network.

python -m tests.k8s.containerd.fetch [RELEASE]
"""

from __future__ import annotations

import sys

from tests.k8s.containerd import cri, engine


def main() -> None:
    """Fetch a release of containerd, by default the newest, and the interface."""
    print(engine.programs(sys.argv[1] if len(sys.argv) > 1 else next(iter(engine.RELEASES))))
    print(cri.description())


if __name__ == "__main__":
    main()
