"""Loads the BPF program that keeps device files to pods, as the daemon does on the user-space plane, and leaves it.

The simulated driver can't carry that plane, so this is run in the daemon's place, confined as its unit says.
"""

from __future__ import annotations

from qgpu.lsm import device_files

device_files.load(()).close()
