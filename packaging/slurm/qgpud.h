// SPDX-License-Identifier: GPL-2.0-only
/* Asks qgpud. Messages are those of qgpu.ipc.wire: four bytes of length, and that many bytes of JSON. */
#ifndef QGPU_QGPUD_H
#define QGPU_QGPUD_H

/* Make a request, with a descriptor or -1. The caller frees the answer, which is NULL if the connection was lost. */
char *ask(int fd, const char *request, int passed);

/* Connect, and ask for the filter. If many tasks start at once, qgpud tells some to try again, or hangs up. */
char *first_answer(int *fd);

/* End the task with qgpud's reason, or with that of the lost connection. */
void __attribute__((noreturn)) pass_on(const char *answer);

#endif
