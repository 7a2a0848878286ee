// SPDX-License-Identifier: GPL-2.0-only
#include "refusal.h"

#include <stdarg.h>
#include <stdio.h>
#include <unistd.h>

#include <slurm/spank.h>

jmp_buf way_out;
bool in_slurmstepd;
const char *why;

void refuse(const char *format, ...)
{
	static char line[1024];
	va_list arguments;

	va_start(arguments, format);
	vsnprintf(line, sizeof(line), format, arguments);
	va_end(arguments);
	if (in_slurmstepd) {
		why = line;
		longjmp(way_out, 1);
	}
	slurm_error("qgpu: %s", line);
	_exit(1);
}
