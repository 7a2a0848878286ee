"""qgpuctl: the command line of the daemon."""
