"""The guardian: the process that stands, in user space, where the kernel module would.

It owns what must outlive the daemon: the pods' seccomp listeners, the register of their RM objects, the
gates and timeslices. The daemon sends it plans under a lease; when the daemon dies or hangs, however it
does, every gate opens, every timeslice goes back, and the pods' calls are still answered.
"""
