"""Whether this host can share GPUs, what is missing, and whether shares are really enforced now."""
