/* SPDX-License-Identifier: GPL-2.0 */
/*
 * attack.h - how an attacker talks to whoever judges it: a report in a file, written once its work is done; then it
 * holds what it has until it is killed. What it says of itself is shown and never believed.
 */
#ifndef _ATTACK_H
#define _ATTACK_H

#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define KIB (1ull << 10)
#define MIB (1ull << 20)

static const char *report_path;
static uint64_t quota;

static inline double now_s(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec + now.tv_nsec / 1e9;
}

/* Say how it went, in one line, all of it at once. */
static inline void report(const char *format, ...)
{
	char temporary[4096];
	va_list arguments;
	FILE *file;

	snprintf(temporary, sizeof(temporary), "%s.%d", report_path, getpid());
	file = fopen(temporary, "w");
	if (!file) {
		perror(temporary);
		exit(3);
	}
	va_start(arguments, format);
	vfprintf(file, format, arguments);
	va_end(arguments);
	fclose(file);
	rename(temporary, report_path);
}

static inline void hold(void)
{
	for (;;)
		pause();
}

/* argv: MODE REPORT QUOTA [more] */
static inline const char *start(int argc, char **argv)
{
	if (argc < 4) {
		fprintf(stderr, "usage: %s MODE REPORT QUOTA_BYTES ...\n", argv[0]);
		exit(2);
	}
	report_path = argv[2];
	quota = strtoull(argv[3], NULL, 0);
	return argv[1];
}

#endif
