"""Slurm: how a job that was given shards or GPUs becomes a pod. The SPANK plugin is packaging/slurm/qgpu_spank.c."""
