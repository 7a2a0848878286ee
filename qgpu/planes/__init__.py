"""The data planes: the kernel module, the guardian in user space, and simulated GPUs, behind one interface."""
