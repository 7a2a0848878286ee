"""qgpu: several pods share one NVIDIA GPU by policy, without touching the pods."""

__version__ = "0.1.0"
