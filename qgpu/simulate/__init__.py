"""``qgpuctl simulate``: scenarios on simulated GPUs in virtual time, what came of them, and pictures of it."""
