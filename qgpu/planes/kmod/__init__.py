"""The kmod plane: pods and plans through qgpu.ko, which enforces plans in the kernel."""

DEVICE = "/dev/qgpu"
