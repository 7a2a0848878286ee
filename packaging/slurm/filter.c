// SPDX-License-Identifier: GPL-2.0-only
#define _GNU_SOURCE
#include "filter.h"

#include <errno.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <linux/filter.h>
#include <linux/seccomp.h>

#include "refusal.h"
#include "settings.h"

#ifndef SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV
#define SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV (1UL << 5)
#endif

/* The caller frees the code. */
static struct sock_fprog filter_of(const char *digits)
{
	size_t size = strlen(digits) / 2;
	unsigned char *code = malloc(size + 1);
	struct sock_fprog program = { .len = size / sizeof(struct sock_filter), .filter = (struct sock_filter *)code };

	if (!code || strlen(digits) % 16 || size / sizeof(struct sock_filter) > BPF_MAXINSNS)
		refuse("%s: no filter of qgpud's", socket_path);
	for (size_t i = 0; i < size; i++)
		if (sscanf(digits + 2 * i, "%2hhx", &code[i]) != 1)
			refuse("%s: no filter of qgpud's", socket_path);
	return program;
}

int install(const char *digits)
{
	static const unsigned long flags[] = {
		SECCOMP_FILTER_FLAG_NEW_LISTENER | SECCOMP_FILTER_FLAG_SPEC_ALLOW |
			SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV,
		SECCOMP_FILTER_FLAG_NEW_LISTENER | SECCOMP_FILTER_FLAG_SPEC_ALLOW, /* before Linux 5.19 */
	};
	struct sock_fprog program = filter_of(digits);

	for (size_t i = 0; i < sizeof(flags) / sizeof(*flags); i++) {
		int fd = syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, flags[i], &program);

		if (fd >= 0) {
			free(program.filter);
			return fd;
		}
	}
	refuse("seccomp user notification: %s; it needs Linux 5.5 or newer, and slurmd outside of any pod",
	       strerror(errno));
}

void deny(const char *digits)
{
	struct sock_fprog program = filter_of(digits);

	for (int i = 0; i < program.len; i++)
		if (program.filter[i].code == (BPF_RET | BPF_K) && program.filter[i].k == SECCOMP_RET_USER_NOTIF)
			program.filter[i].k = SECCOMP_RET_ERRNO | EPERM;
	if (syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_SPEC_ALLOW, &program))
		refuse("seccomp: %s; slurmd needs CAP_SYS_ADMIN", strerror(errno));
	free(program.filter);
}
