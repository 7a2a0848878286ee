"""Kernel interfaces that Python lacks: seccomp notifications, cgroups, /proc, sets of open files. No GPU code."""
