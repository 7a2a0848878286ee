"""The kmod plane: pods and plans through qgpu.ko, which keeps their time in the kernel."""

DEVICE = "/dev/qgpu"
