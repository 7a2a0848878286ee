"""Enforcement on the file: a BPF program in the kernel keeps what pods open of NVIDIA's devices to the pods."""
