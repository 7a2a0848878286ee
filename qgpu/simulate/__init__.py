"""``qgpuctl simulate``: runs scenarios on simulated GPUs in virtual time, and reports and plots the results."""
