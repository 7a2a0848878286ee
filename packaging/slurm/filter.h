// SPDX-License-Identifier: GPL-2.0-only
/* The pods' seccomp filter of plane seccomp, which qgpud sends as hexadecimal digits. */
#ifndef QGPU_FILTER_H
#define QGPU_FILTER_H

/* Install the filter on this task; return its listener. */
int install(const char *digits);

/* Make the calls that the filter would ask qgpud about fail, in this thread and in all that it starts from now on. */
void deny(const char *digits);

#endif
