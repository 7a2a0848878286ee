"""Descriptors are few, and whoever runs out of them must not stop others: what is taken for long leaves some over.

A guardian holds a descriptor for each process and each listener; one that had none left could not serve a call, nor
hear its daemon. So those that are held for long may not be the last ones, and a call that finds none waits for one.
"""

from __future__ import annotations

import errno
import os
import resource

#: What the kernel says when there is none left, here or on the whole machine.
NONE_LEFT = frozenset({errno.EMFILE, errno.ENFILE})
#: So many are for what is open only for a moment.
_LEFT_OVER = 256


def long_held(fd: int) -> int:
    """Return a descriptor that is to be held for long. Raises OSError, and closes it, when too few are left.

    The kernel gives out the lowest number that is free, so a high one says that the table is full.
    """
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most != resource.RLIM_INFINITY and fd >= most - min(_LEFT_OVER, most // 4):
        os.close(fd)
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    return fd
