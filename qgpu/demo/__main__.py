"""``python -m qgpu.demo``."""

from qgpu.demo.main import main

main()
