"""Checks whether this host can share GPUs, what is missing, and whether shares are enforced now."""
