"""NVIDIA's resource manager (RM) as user space reaches it: its ABI, its driver branches, a client.

Names here are RM's own. This package knows nothing of pods, plans or policies.
"""
