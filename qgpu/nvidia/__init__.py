"""RM, NVIDIA's resource manager, as user space reaches it: its ABI, its driver branches, a client.

Names here are RM's own. Nothing in this package knows of pods, plans or policies.
"""
