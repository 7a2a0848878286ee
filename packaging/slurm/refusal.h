// SPDX-License-Identifier: GPL-2.0-only
/* Ends a task that does not get what it needs, with one line that says why. */
#ifndef QGPU_REFUSAL_H
#define QGPU_REFUSAL_H

#include <setjmp.h>
#include <stdbool.h>

/* Where slurmstepd itself continues after a refusal; a task ends instead. */
extern jmp_buf way_out;
extern bool in_slurmstepd;
extern const char *why;

/* End the task. Its one line says why, to the user and in slurmd's log. */
void __attribute__((noreturn, format(printf, 1, 2))) refuse(const char *format, ...);

#endif
