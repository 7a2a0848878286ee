"""A pod's system calls: decode, check, perform or refuse, and answer."""
