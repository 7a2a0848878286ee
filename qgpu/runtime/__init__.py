"""Containers: how a container of any OCI runtime becomes a pod, with nothing in its image."""
