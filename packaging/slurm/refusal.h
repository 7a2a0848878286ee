// SPDX-License-Identifier: GPL-2.0-only
/* How a task ends that does not get what it needs: with one line that says why. */
#ifndef QGPU_REFUSAL_H
#define QGPU_REFUSAL_H

#include <setjmp.h>
#include <stdbool.h>

/* Where slurmstepd itself goes on after a refusal; a task has no such place. */
extern jmp_buf way_out;
extern bool in_slurmstepd;
extern const char *why;

/* The task ends here: its one line says why, to the user and in slurmd's log. */
void __attribute__((noreturn, format(printf, 1, 2))) refuse(const char *format, ...);

#endif
