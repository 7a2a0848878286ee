// SPDX-License-Identifier: GPL-2.0
/* Records the ioctls that a program makes on NVIDIA's device files: preload it, with QGPU_RECORD=FILE.
 *
 * One JSON object a line, in the form of tests/data/calls: the argument before and after the call, and for RM controls
 * and allocations the parameters that it points to. A call that was recorded SAME times with the same numbers is left
 * out from then on, because programs repeat themselves.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { ESC_ALLOC = 0x2b, ESC_CONTROL = 0x2a, SAME = 3, KINDS = 1 << 14, MOST = 1 << 14, LONGEST = 1 << 16 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct {
	uint64_t kind;
	int seen;
} kinds[KINDS];
static FILE *out;
static unsigned long sequence;
static pid_t owner;

static void hex(const char *name, const void *data, size_t size)
{
	const unsigned char *bytes = data;

	fprintf(out, ",\"%s\":\"", name);
	for (size_t i = 0; i < size; i++)
		fprintf(out, "%02x", bytes[i]);
	fputc('"', out);
}

/* Tells whether calls of this kind are still recorded. */
static int is_wanted(uint64_t kind)
{
	size_t slot = (kind * 0x9e3779b97f4a7c15ull) >> 50;

	for (size_t i = 0; i < KINDS; i++, slot = (slot + 1) % KINDS) {
		if (kinds[slot].seen && kinds[slot].kind != kind)
			continue;
		kinds[slot].kind = kind;
		return kinds[slot].seen++ < SAME;
	}
	return 0;
}

/* Copies parameters, which may not be mapped: by a system call that says so instead of a fault. */
static size_t copy(void *to, uint64_t from, size_t size)
{
	struct {
		void *base;
		size_t len;
	} mine = { to, size }, theirs = { (void *)from, size };
	long got = syscall(SYS_process_vm_readv, getpid(), &mine, 1, &theirs, 1, 0);

	return got > 0 ? (size_t)got : 0;
}

static int start(void)
{
	char name[4096];
	const char *file = getenv("QGPU_RECORD");

	if (!file)
		return 0;
	if (out && owner == getpid())
		return 1;
	/* A child records into a file of its own. */
	snprintf(name, sizeof(name), "%s.%d", file, getpid());
	out = fopen(name, "we");
	owner = getpid();
	sequence = 0;
	memset(kinds, 0, sizeof(kinds));
	return out != NULL;
}

/* What is known of a call before it is made. */
struct call {
	size_t size, held, known;
	char *before, *params;
};

/* Copies the argument of a call and the parameters that it points to; tells whether the call is to be recorded. */
static int look(struct call *call, unsigned long request, void *argument)
{
	uint32_t number = request & 0xff, command = 0, params_size = 0;
	uint64_t at = 0;

	/* UVM's numbers do not carry a size. */
	call->size = (request >> 8 & 0xff) == 'F' ? request >> 16 & 0x3fff : 0;
	call->held = call->size ? copy(call->before, (uint64_t)argument, call->size) : 0;
	if (number == ESC_CONTROL && call->held >= 32) {
		memcpy(&command, call->before + 8, 4);
		memcpy(&at, call->before + 16, 8);
		memcpy(&params_size, call->before + 24, 4);
	} else if (number == ESC_ALLOC && call->held >= 32) {
		memcpy(&command, call->before + 12, 4);
		memcpy(&at, call->before + 16, 8);
		memcpy(&params_size, call->before + (call->held >= 48 ? 32 : 24), 4);
	}
	if (at && params_size)
		call->known = copy(call->params, at, params_size > LONGEST ? LONGEST : params_size);
	return is_wanted((uint64_t)request << 32 | command);
}

int ioctl(int fd, unsigned long request, ...)
{
	static int (*real)(int, unsigned long, ...);
	char link[64], device[256];
	struct timespec began, ended;
	struct call call = { 0 };
	va_list list;
	void *argument;
	ssize_t length;
	int ret, error, wanted;

	va_start(list, request);
	argument = va_arg(list, void *);
	va_end(list);
	if (!real)
		*(void **)&real = dlsym(RTLD_NEXT, "ioctl");
	snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
	length = readlink(link, device, sizeof(device) - 1);
	if (length < 11 || memcmp(device, "/dev/nvidia", 11) || !getenv("QGPU_RECORD"))
		return real(fd, request, argument);
	device[length] = 0;
	call.before = malloc(MOST);
	call.params = malloc(LONGEST);
	pthread_mutex_lock(&lock);
	wanted = start() && look(&call, request, argument);
	pthread_mutex_unlock(&lock);
	clock_gettime(CLOCK_MONOTONIC, &began);
	ret = real(fd, request, argument);
	error = errno;
	clock_gettime(CLOCK_MONOTONIC, &ended);
	if (wanted) {
		pthread_mutex_lock(&lock);
		fprintf(out, "{\"seq\":%lu,\"op\":\"ioctl\",\"fd\":%d,\"dev\":\"%s\",\"req\":%lu", sequence++, fd, device,
			request);
		hex("in", call.before, call.held);
		if (call.known)
			hex("pin", call.params, call.known);
		call.held = call.size ? copy(call.before, (uint64_t)argument, call.size) : 0;
		hex("out", call.before, call.held);
		fprintf(out, ",\"ret\":%d,\"errno\":%d,\"ns\":%lld}\n", ret, ret ? error : 0,
			(ended.tv_sec - began.tv_sec) * 1000000000ll + ended.tv_nsec - began.tv_nsec);
		fflush(out);
		pthread_mutex_unlock(&lock);
	}
	free(call.before);
	free(call.params);
	errno = error;
	return ret;
}
