"""Device isolation: a BPF LSM program lets only a pod use the NVIDIA device files that it opened."""
