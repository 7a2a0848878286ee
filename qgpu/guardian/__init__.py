"""The guardian: the user-space process that does the kernel module's work.

It owns what must outlive the daemon: the pods' seccomp listeners, the table of their RM objects, the gates and the
timeslices. The daemon sends plans under a lease. When the daemon dies or hangs, every gate opens, every timeslice
returns to the driver's value, and the guardian still answers the pods' calls.
"""
