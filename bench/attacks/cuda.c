// SPDX-License-Identifier: GPL-2.0
/*
 * cuda.c - a CUDA program that takes all the video memory it can get by one of CUDA's ways. It stops at three times its
 * quota; managed memory, which may hang a card that runs out, at one and a half.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <sched.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include "cu.h"

/* UVM's calls, kernel-open/nvidia-uvm/uvm_ioctl.h */
#define UVM_INITIALIZE 0x30000001
#define UVM_REGISTER_GPU 37
#define UVM_MAP_DYNAMIC_PARALLELISM_REGION 65
#define UVM_ALLOC_SEMAPHORE_POOL 68
#define UVM_CREATE_EXTERNAL_RANGE 73
#define UVM_MAP_EXTERNAL_SPARSE 74

static uint64_t claimed, refused, most;
static int last_error;

static void took(int code, uint64_t size)
{
	if (code) {
		refused++;
		last_error = code;
	} else {
		claimed += size;
	}
}

static int uvm = -1;
static uint8_t card[16];
static bool by_a_child;
static struct { int fd; void *argument; long result; } initialising;

static int initialise(void *nothing)
{
	initialising.result = syscall(SYS_ioctl, initialising.fd, (unsigned long)UVM_INITIALIZE, initialising.argument);
	return 0;
}

/* libcuda finds this in place of libc's: the program exports it. */
int ioctl(int fd, unsigned long request, ...)
{
	static char stack[65536];
	va_list arguments;
	void *argument;

	va_start(arguments, request);
	argument = va_arg(arguments, void *);
	va_end(arguments);
	if (request == UVM_REGISTER_GPU) {
		uvm = fd;
		memcpy(card, argument, sizeof(card));
	}
	if (request != UVM_INITIALIZE || !by_a_child)
		return (int)syscall(SYS_ioctl, fd, request, argument);
	/* a process that shares all with this one, and is gone when it has been noted for it */
	initialising.fd = fd;
	initialising.argument = argument;
	waitpid(clone(initialise, stack + sizeof(stack), CLONE_VM | CLONE_FILES | SIGCHLD, NULL), NULL, 0);
	usleep(50000);
	return (int)initialising.result;
}

typedef int (*maker)(uint64_t size);

static void take_all(maker make)
{
	for (uint64_t size = quota / 2; size >= 64 * KIB; size /= 2) {
		int code = 0;

		while (!code && claimed < most)
			took(code = make(size), size);
	}
}

static int by_malloc(uint64_t size)
{
	CUdeviceptr at;

	return CU(cuMemAlloc_v2, &at, (size_t)size);
}

static int by_pool(uint64_t size)
{
	CUdeviceptr at;
	int code = CU(cuMemAllocAsync, &at, (size_t)size, NULL);

	return code ?: CU(cuStreamSynchronize, NULL);
}

static bool keep_descriptor, free_after;
static int kept[64], nr_kept;

static int by_vmm(uint64_t size)
{
	struct cu_prop prop = { .type = 1, .handle_types = keep_descriptor ? CU_POSIX_FD : 0,
				.location = CU_DEVICE_LOCATION };
	struct cu_access access = { CU_DEVICE_LOCATION, 3 };
	unsigned long long handle;
	CUdeviceptr at;
	int code, fd;

	size = (size + 2 * MIB - 1) & ~(2 * MIB - 1);
	code = CU(cuMemCreate, &handle, (size_t)size, &prop, 0ull);
	if (code)
		return code;
	if (keep_descriptor && CU(cuMemExportToShareableHandle, &fd, handle, CU_POSIX_FD, 0ull))
		keep_descriptor = false;
	if (keep_descriptor && nr_kept < 64)
		kept[nr_kept++] = fd;
	if (free_after)
		return CU(cuMemRelease, handle);
	code = CU(cuMemAddressReserve, &at, (size_t)size, (size_t)0, 0ull, 0ull);
	code = code ?: CU(cuMemMap, at, (size_t)size, (size_t)0, handle, 0ull);
	return code ?: CU(cuMemSetAccess, at, (size_t)size, &access, (size_t)1);
}

/* The handle is released while its mapping lives on. */
static int by_mapping(uint64_t size)
{
	struct cu_prop prop = { .type = 1, .location = CU_DEVICE_LOCATION };
	struct cu_access access = { CU_DEVICE_LOCATION, 3 };
	unsigned long long handle;
	CUdeviceptr at;
	int code;

	size = (size + 2 * MIB - 1) & ~(2 * MIB - 1);
	code = CU(cuMemCreate, &handle, (size_t)size, &prop, 0ull);
	code = code ?: CU(cuMemAddressReserve, &at, (size_t)size, (size_t)0, 0ull, 0ull);
	code = code ?: CU(cuMemMap, at, (size_t)size, (size_t)0, handle, 0ull);
	code = code ?: CU(cuMemSetAccess, at, (size_t)size, &access, (size_t)1);
	return code ?: CU(cuMemRelease, handle);
}

static int by_managed(uint64_t size)
{
	CUdeviceptr at;
	int code = CU(cuMemAllocManaged, &at, (size_t)size, 1u);

	if (code)
		return code;
	code = CU(cuMemsetD8_v2, at, (unsigned char)1, (size_t)size); /* on the card, so that it is there */
	return code ?: CU(cuCtxSynchronize);
}

static int by_context(uint64_t size)
{
	void *context;

	(void)size;
	return CU(cuCtxCreate_v2, &context, 0, 0);
}

static int by_graph(uint64_t size)
{
	struct cu_access access = { CU_DEVICE_LOCATION, 3 };
	struct cu_alloc_node node = { .pool = { .type = 1, .location = CU_DEVICE_LOCATION }, .access = &access,
				      .nr_access = 1, .bytes = size };
	void *graph, *added, *executable;
	int code = CU(cuGraphCreate, &graph, 0);

	code = code ?: CU(cuGraphAddMemAllocNode, &added, graph, NULL, (size_t)0, &node);
	code = code ?: CU(cuGraphInstantiateWithFlags, &executable, graph, 0ull);
	code = code ?: CU(cuGraphLaunch, executable, NULL);
	return code ?: CU(cuStreamSynchronize, NULL);
}

static int by_array(uint64_t size)
{
	struct { size_t width, height; int format; unsigned int channels; } array = { 16384, size / 16384 / 4, 0x20, 1 };
	void *made;

	return array.height && array.height <= 65536 ? CU(cuArrayCreate_v2, &made, &array) : 1;
}

/* Run this program anew as one that opens what this one made; what CUDA told it. */
static int opened_by_another(char **argv, const char *mode, const char *what)
{
	double until = now_s() + 5;
	int told = -1;
	char own[512];
	FILE *file;

	snprintf(own, sizeof(own), "%s.opened", argv[2]);
	if (!fork()) {
		execl("/proc/self/exe", argv[0], mode, own, argv[3], what, NULL);
		_exit(1);
	}
	while (!(file = fopen(own, "r")) && now_s() < until)
		usleep(20000);
	if (!file || fscanf(file, "opened: %d", &told) != 1)
		told = -1;
	if (file)
		fclose(file);
	return told;
}

/* One process makes it, another opens it: it counts once, and is there until the last lets go. */
static int by_ipc(char **argv)
{
	struct { char bytes[64]; } handle;
	char hex[129] = "";
	CUdeviceptr at;
	int told;

	took(CU(cuMemAlloc_v2, &at, (size_t)(quota / 4)), quota / 4);
	if (CU(cuIpcGetMemHandle, &handle, at))
		return -1;
	for (int i = 0; i < 64; i++)
		sprintf(hex + 2 * i, "%02x", (unsigned char)handle.bytes[i]);
	told = opened_by_another(argv, "ipc-open", hex);
	CU(cuMemFree_v2, at);
	return told;
}

static void ipc_open(const char *hex)
{
	struct { char bytes[64]; } handle;
	CUdeviceptr at;

	for (int i = 0; i < 64; i++)
		sscanf(hex + 2 * i, "%2hhx", (unsigned char *)&handle.bytes[i]);
	report("opened: %d", CU(cuIpcOpenMemHandle_v2, &at, handle, 1u));
	hold();
}

/* The same with a descriptor, which the other inherits. */
static int by_descriptor(char **argv)
{
	struct cu_prop prop = { .type = 1, .handle_types = CU_POSIX_FD, .location = CU_DEVICE_LOCATION };
	unsigned long long handle;
	int code = CU(cuMemCreate, &handle, (size_t)(quota / 4), &prop, 0ull), fd;
	char number[16];

	took(code, quota / 4);
	if (code || CU(cuMemExportToShareableHandle, &fd, handle, CU_POSIX_FD, 0ull))
		return -1;
	fcntl(fd, F_SETFD, 0);
	snprintf(number, sizeof(number), "%d", fd);
	return opened_by_another(argv, "descriptor-open", number);
}

static void descriptor_open(const char *number)
{
	struct cu_access access = { CU_DEVICE_LOCATION, 3 };
	unsigned long long handle;
	CUdeviceptr at;
	int code = CU(cuMemImportFromShareableHandle, &handle, (void *)atol(number), CU_POSIX_FD);

	code = code ?: CU(cuMemAddressReserve, &at, (size_t)(quota / 4), (size_t)0, 0ull, 0ull);
	code = code ?: CU(cuMemMap, at, (size_t)(quota / 4), (size_t)0, handle, 0ull);
	report("opened: %d", code ?: CU(cuMemSetAccess, at, (size_t)(quota / 4), &access, (size_t)1));
	hold();
}

/* A program takes a quarter and ends, but for a child that calls nobody and keeps some descriptors. */
static void leave_sleeper(bool exports)
{
	char link[64], name[32];
	pid_t pid = fork();

	if (pid) {
		waitpid(pid, NULL, 0);
		return;
	}
	cu_open();
	keep_descriptor = free_after = exports;
	if (exports ? by_vmm(quota / 4) : by_malloc(quota / 4))
		report("cannot start: no memory to be kept"), _exit(4);
	if (fork())
		_exit(0);
	for (int fd = 3; fd < 1024; fd++) {
		bool wanted = false;

		for (int i = 0; i < nr_kept; i++)
			wanted |= kept[i] == fd;
		snprintf(name, sizeof(name), "/proc/self/fd/%d", fd);
		memset(link, 0, sizeof(link));
		if (!exports && readlink(name, link, sizeof(link) - 1) > 0)
			wanted = !strcmp(link, "/dev/nvidia-uvm");
		if (!wanted)
			close(fd);
	}
	hold();
}

/* Page tables that UVM makes for address space with nothing in it: regions of one page, far apart; sparse; for semaphores. */
static void tables(void)
{
	struct range { uint64_t base, length; uint8_t card[16]; uint32_t status; } range = { .length = 4 * KIB };
	struct { uint64_t base, length; uint32_t status; } external = { 32ull << 40, 1ull << 40, 0 };
	static struct { uint64_t base, length; uint8_t attributes[256 * 36]; uint64_t count; uint32_t status; } pool;

	memcpy(range.card, card, sizeof(card));
	for (uint64_t i = 0; i < 40000; i++) {
		range.base = (4ull << 40) + (i << 29);
		syscall(SYS_ioctl, uvm, (unsigned long)UVM_MAP_DYNAMIC_PARALLELISM_REGION, &range);
		took((int)range.status, 0);
	}
	syscall(SYS_ioctl, uvm, (unsigned long)UVM_CREATE_EXTERNAL_RANGE, &external);
	range.base = external.base;
	range.length = external.length;
	syscall(SYS_ioctl, uvm, (unsigned long)UVM_MAP_EXTERNAL_SPARSE, &range);
	took((int)(external.status ?: range.status), 0);
	for (uint64_t i = 0; i < 2000; i++) {
		pool.base = (48ull << 40) + (i << 29);
		pool.length = 4 * KIB;
		syscall(SYS_ioctl, uvm, (unsigned long)UVM_ALLOC_SEMAPHORE_POOL, &pool);
		took((int)pool.status, 0);
	}
}

/* What the children report, as one. */
static void add_up(const char *path, int count)
{
	unsigned long long all_claimed = 0, all_refused = 0, one, other;
	double until = now_s() + 8;
	int there = 0;

	for (int i = 0; i < count && now_s() < until;) {
		char own[512], said[256] = "";
		FILE *file;

		snprintf(own, sizeof(own), "%s.%d", path, i);
		file = fopen(own, "r");
		if (!file) {
			usleep(20000);
			continue;
		}
		i++;
		if (fgets(said, sizeof(said), file) && sscanf(said, "claimed %llu refused %llu", &one, &other) == 2)
			there++, all_claimed += one, all_refused += other;
		else
			fprintf(stderr, "%s\n", said);
		fclose(file);
	}
	report("claimed %llu refused %llu by %d of %d programs", all_claimed, all_refused, there, count);
}

/* Children that exec, so that each has a CUDA of its own. */
static void many(char **argv, int count, bool orphans)
{
	for (int i = 0; i < count; i++) {
		pid_t pid = fork();

		if (!pid) {
			char path[512];

			if (orphans && (setsid(), fork()))
				_exit(0);
			snprintf(path, sizeof(path), "%s.%d", argv[2], i);
			execl("/proc/self/exe", argv[0], "malloc", path, argv[3], NULL);
			_exit(1);
		}
		if (orphans)
			waitpid(pid, NULL, 0);
	}
	add_up(argv[2], count);
}

static const struct {
	const char *mode;
	maker make;
} straight[] = {
	{ "malloc", by_malloc }, { "pool", by_pool }, { "vmm", by_vmm }, { "vmm-mapping", by_mapping },
	{ "managed", by_managed }, { "contexts", by_context }, { "graph", by_graph }, { "array", by_array },
};

int main(int argc, char **argv)
{
	const char *mode = start(argc, argv);
	size_t free_bytes = 0, total = 0;
	char also[64] = "";
	int opened = -2;

	most = 3 * quota;
	if (!strcmp(mode, "processes") || !strcmp(mode, "orphans")) {
		many(argv, 5, !strcmp(mode, "orphans"));
		hold();
	}
	if (!strcmp(mode, "export-sleeper") || !strcmp(mode, "uvm-sleeper"))
		leave_sleeper(!strcmp(mode, "export-sleeper"));
	by_a_child = !strcmp(mode, "managed-child");
	cu_open();
	if (!strcmp(mode, "exec")) { /* what this life has is given back when the next begins */
		took(by_malloc(quota / 2), quota / 2);
		execl("/proc/self/exe", argv[0], "executed", argv[2], argv[3], NULL);
	}
	if (!strcmp(mode, "ipc-open"))
		ipc_open(argv[4]);
	if (!strcmp(mode, "descriptor-open"))
		descriptor_open(argv[4]);
	CU(cuMemGetInfo_v2, &free_bytes, &total);
	for (size_t i = 0; i < sizeof(straight) / sizeof(straight[0]); i++) {
		if (!strcmp(mode, straight[i].mode)) {
			if (straight[i].make == by_managed)
				most = quota + quota / 2;
			take_all(straight[i].make);
		}
	}
	if (by_a_child) {
		most = quota + quota / 2;
		take_all(by_managed);
	} else if (!strcmp(mode, "uvm-tables")) {
		tables();
		take_all(by_malloc);
	} else if (!strcmp(mode, "executed")) {
		sleep(2);
		take_all(by_malloc);
		if (claimed < quota / 2 + quota / 8)
			report("cannot start: only %llu, charged twice", (unsigned long long)claimed), hold();
	} else if (!strcmp(mode, "managed-then-malloc")) {
		most = quota + quota / 2;
		took(by_managed(quota / 2), quota / 2);
		took(by_managed(quota / 4), quota / 4);
		take_all(by_malloc);
	} else if (!strcmp(mode, "vmm-export")) {
		keep_descriptor = true;
		take_all(by_vmm);
	} else if (!strcmp(mode, "vmm-descriptor")) { /* let go of, but for the descriptor */
		keep_descriptor = free_after = true;
		take_all(by_vmm);
	} else if (strstr(mode, "sleeper")) {
		take_all(by_malloc);
	} else if (!strcmp(mode, "ipc") || !strcmp(mode, "shared")) {
		opened = !strcmp(mode, "ipc") ? by_ipc(argv) : by_descriptor(argv);
		take_all(by_malloc);
	} else if (!strcmp(mode, "after-refusal")) { /* refused, the context is as good as before */
		void *function = cu_kernel("spin");
		uint64_t rounds = 1000;
		void *parameters[] = { &rounds };

		take_all(by_malloc);
		last_error = cu_launch(function, parameters) ?: CU(cuCtxSynchronize);
	}
	if (opened != -2)
		snprintf(also, sizeof(also), ", opened by another: %d", opened);
	report("claimed %llu refused %llu last error %d%s; card shown as %llu MiB, %llu free",
	       (unsigned long long)claimed, (unsigned long long)refused, last_error, also,
	       (unsigned long long)(total / MIB), (unsigned long long)(free_bytes / MIB));
	hold();
}
