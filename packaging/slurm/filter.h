// SPDX-License-Identifier: GPL-2.0-only
/* The pods' seccomp filter of plane seccomp, which qgpud sends as hexadecimal digits. */
#ifndef QGPU_FILTER_H
#define QGPU_FILTER_H

/* Install the filter on this task; return its listener. */
int install(const char *digits);

/* Have calls fail here, and in whatever this thread starts from now on, that the filter would ask about. */
void deny(const char *digits);

#endif
