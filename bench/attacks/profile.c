// SPDX-License-Identifier: GPL-2.0
/*
 * profile.c - a program that floods the card and meanwhile uses what profilers and debuggers may call on what is not its
 * own: contexts, caches, control files, mappings, and controls that only firmware reads.
 */
#include <dirent.h>

#include "profile.h"

/* Sent to firmware unread. */
static const struct { uint32_t cmd, size; } unread[] = { { 0x2080a06d, 56 }, { 0x2080a0c8, 22924 } };

static long make_debugger(struct rm *of, uint32_t debugger, uint32_t client, uint32_t object, uint32_t *handle)
{
	struct { uint32_t debugger, client, object; } target = { debugger, client, object };

	*handle = ++of->last;
	return rm_alloc(of, rm_plain, of->device, DEBUGGER, &target, handle);
}

/* Debuggers of contexts that are not theirs, by both kinds of clients; then one's own, with its modes set over and over. */
static void debug(void)
{
	static struct rm *const of[] = { &rm, &second };
	uint32_t objects[] = { compute, channels[0], tsg, compute - 1, compute + 1, rm.device }, handle, yes = 1;

	for (uint32_t i = 0; i < nr_neighbours; i++) {
		for (size_t j = 0; j < sizeof(objects) / sizeof(objects[0]); j++) {
			for (int k = 0; k < 2; k++) {
				if (reach(make_debugger(of[k], 0, neighbours[i], objects[j], &handle)))
					rm_free(of[k], handle);
				if (reach(make_debugger(of[k], neighbours[i], rm.client, objects[j], &handle)))
					rm_free(of[k], handle);
			}
		}
	}
	if (make_debugger(&rm, 0, rm.client, compute, &handle) != NV_OK)
		return;
	snprintf(note, sizeof(note), "; own debugger made");
	for (int i = 0; i < 200; i++, yes = !yes) {
		ask_profiler(&rm, handle, 0x83de0307, &yes, sizeof(yes)); /* SET_MODE_MMU_DEBUG */
		ask_profiler(&rm, handle, 0x83de031f, &yes, sizeof(yes)); /* SET_MODE_ERRBAR_DEBUG */
	}
	rm_free(&rm, handle);
}

/* What a debugger could do to a context, and to memory by a channel's name: no pod may, not even to its own. */
static void suspend(void)
{
	static const struct { uint32_t cmd, size; } acts[] = { { 0x83de0318, 0 }, { 0x83de0317, 8 }, { 0x83de0318, 0 },
							       { 0x83de0315, 24 }, { 0x83de0316, 24 } };
	uint8_t nothing[24] = { 0 };
	uint32_t handle;
	bool made = make_debugger(&rm, 0, rm.client, compute, &handle) == NV_OK;

	for (int rounds = 0; rounds < 50; rounds++)
		for (size_t i = 0; i < sizeof(acts) / sizeof(acts[0]); i++)
			reach(ask_profiler(&rm, handle, acts[i].cmd, nothing, acts[i].size));
	if (made)
		rm_free(&rm, handle);
	snprintf(note, sizeof(note), "; own debugger %s", made ? "made" : "refused");
}

/* A profiler of another's context, and another's profiler by its name. */
static void profile_others(void)
{
	static const uint32_t handles[] = { 0xc0000006, 0x5e000003, 0x5c000003 };
	uint32_t contexts[] = { tsg, channels[0], 0 }, handle;
	static const uint8_t nothing[22924];

	for (uint32_t i = 0; i < nr_neighbours; i++) {
		struct rm theirs = second;

		for (size_t j = 0; j < sizeof(contexts) / sizeof(contexts[0]); j++)
			if (reach(make_profiler(&second, neighbours[i], contexts[j], &handle)))
				rm_free(&second, handle);
		theirs.client = neighbours[i];
		for (size_t j = 0; j < sizeof(handles) / sizeof(handles[0]); j++) {
			theirs.subdevice = handles[j];
			if (reach(make_profiler(&theirs, 0, 0, &handle)))
				rm_free(&theirs, handle);
			reach(ask_profiler(&theirs, handles[j], RESERVE_SMPC, nothing, 1));
			reach(ask_profiler(&theirs, handles[j], EXEC_REG_OPS, nothing, 3980));
			reach(ask_profiler(&theirs, handles[j], FREE_STREAM, nothing, 4));
			for (int k = 0; k < 2; k++)
				reach(ask_profiler(&theirs, handles[j], unread[k].cmd, nothing, unread[k].size));
		}
	}
}

static long flush_cache(uint32_t flags, uint32_t count)
{
	static __thread NV2080_CTRL_FB_FLUSH_GPU_CACHE_PARAMS *params;

	params = params ?: rm_low(sizeof(*params));
	*params = (NV2080_CTRL_FB_FLUSH_GPU_CACHE_PARAMS){ .addressArraySize = count, .addressAlign = 1,
							   .memBlockSizeBytes = 64 * KIB, .flags = flags };
	for (uint32_t i = 0; i < count && i < 500; i++)
		params->addressArray[i] = i * 64 * KIB;
	return rm_control(&second, rm_plain, second.client, second.subdevice, NV2080_FB_FLUSH_GPU_CACHE, params,
			  sizeof(*params));
}

/* By chosen addresses, without writing back, or with bits that mean nothing. */
static void flush(void)
{
	static const uint32_t flags[] = { 0x00, 0x04, 0x08, 0x0c, 0x14, 0x18, 0x1e, 0x1f, 0x3c, 0x2c, 0x8000001c };

	grant(flush_cache(FLUSH_WHOLE_CACHE, 0));
	for (size_t i = 0; i < sizeof(flags) / sizeof(flags[0]); i++) {
		reach(flush_cache(flags[i], 0));
		reach(flush_cache(flags[i], 500));
	}
}

static void *many_flushes(void *nothing)
{
	for (;;)
		if (!grant(flush_cache(FLUSH_WHOLE_CACHE, 0)))
			usleep(1000);
	return nothing;
}

/* Controls that only the firmware reads, with a byte that is not zero. */
static void unread_bytes(void)
{
	static uint8_t bytes[22924];

	for (int i = 0; i < 2; i++) {
		const uint32_t places[] = { 0, unread[i].size / 2, unread[i].size - 1 };

		grant(ask_profiler(&second, second.subdevice, unread[i].cmd, bytes, unread[i].size));
		for (int j = 0; j < 3; j++) {
			bytes[places[j]] = 1;
			reach(ask_profiler(&second, second.subdevice, unread[i].cmd, bytes, unread[i].size));
			bytes[places[j]] = 0;
		}
	}
}

static bool tie(int file, int to)
{
	return !rm_plain(file, NV_ESC_REGISTER_FD, &to, sizeof(to));
}

/*
 * Control files tied to one's own, to numbers that are open elsewhere only, and to files taken from other processes. The
 * last is for the host's root, who has what such a file reaches already, and proves nothing: it is told, not counted.
 */
static void ties(void)
{
	static int files[64];
	struct dirent *entry;
	DIR *all = opendir("/proc");
	uint32_t taken = 0, tied = 0, answered = 0, ids[32];

	for (int i = 0; i < 64; i++) {
		files[i] = files[i] ?: open("/dev/nvidiactl", O_RDWR);
		if (files[i] >= 0)
			grant(tie(files[i], rm.ctl) ? NV_OK : errno);
	}
	for (int number = 3; number < 256; number++) {
		int file = open("/dev/nvidiactl", O_RDWR);

		if (fcntl(number, F_GETFD) < 0)
			reach(tie(file, number) ? NV_OK : errno);
		close(file);
	}
	while (all && (entry = readdir(all))) {
		int pid = atoi(entry->d_name), pidfd;

		if (pid < 2 || pid == getpid() || pid == getppid())
			continue;
		pidfd = syscall(SYS_pidfd_open, pid, 0);
		for (int number = 3; pidfd >= 0 && number < 64 && taken < 16; number++) {
			char path[64], what[32] = "";
			int theirs, file;

			snprintf(path, sizeof(path), "/proc/%d/fd/%d", pid, number);
			if (readlink(path, what, sizeof(what) - 1) < 0 || strcmp(what, "/dev/nvidiactl"))
				continue;
			theirs = syscall(SYS_pidfd_getfd, pidfd, number, 0);
			file = open("/dev/nvidiactl", O_RDWR);
			taken += theirs >= 0;
			if (theirs >= 0 && tie(file, theirs)) {
				tied++;
				for (uint32_t i = 0; i < nr_neighbours; i++) {
					struct rm through = { .ctl = file, .client = neighbours[i] };

					answered += !rm_control(&through, rm_plain, through.client, through.client,
								0x201, ids, sizeof(ids)); /* GET_ATTACHED_IDS */
				}
			}
			close(file);
			close(theirs);
		}
		if (pidfd >= 0)
			close(pidfd);
	}
	if (all)
		closedir(all);
	snprintf(note, sizeof(note), "; as the host's root: %u files taken, %u tied, %u answers through them", taken, tied,
		 answered);
}

static long map(const struct rm *of, uint32_t device, uint32_t memory, uint64_t offset, uint64_t length, int fd)
{
	NVOS33_PARAMETERS_WITH_FD call = { .hClient = of->client, .hDevice = device, .hMemory = memory, .offset = offset,
					   .length = length, .status = ~0u, .fd = fd };

	return rm_plain(of->ctl, NV_ESC_RM_MAP_MEMORY, &call, sizeof(call)) < 0 ? -1 : (long)call.status;
}

static int open_card(void)
{
	char name[32], path[64] = "";

	snprintf(name, sizeof(name), "/proc/self/fd/%d", second.card);
	return readlink(name, path, sizeof(path) - 1) < 0 ? -1 : open(path, O_RDWR);
}

/* Memory that is not theirs, by clients that the guardian made, which RM takes for the guardian's own. */
static void maps(void)
{
	uint32_t own_memory, memory;
	int fd = open_card(), kept = 0;
	bool mapped;

	if (make_memory(&second, 64 * KIB, &own_memory) != NV_OK)
		return;
	mapped = map(&second, second.device, own_memory, 0, 64 * KIB, fd) == NV_OK;
	reach(map(&second, second.device, own_memory, 0, 1ull << 30, open_card()));
	reach(map(&second, second.device, own_memory, 1ull << 30, 64 * KIB, open_card()));
	reach(map(&second, second.device, own_memory, ~0ull - 4095, 8192, open_card()));
	for (int number = 3; number < 256; number++)
		if (fcntl(number, F_GETFD) < 0)
			reach(map(&second, second.device, own_memory, 0, 64 * KIB, number));
	for (uint32_t i = 0; i < nr_neighbours; i++) {
		struct rm theirs = second;

		theirs.client = neighbours[i];
		for (uint32_t object = 1; object < 24; object++) {
			fd = open_card();
			reach(map(&theirs, 0x5c000002, 0x5c000000 + object, 0, 4 * KIB, fd));
			reach(map(&theirs, 0x5c000003, 0x5c000000 + object, 0, 4 * KIB, fd));
			reach(map(&second, second.device, 0x5c000000 + object, 0, 4 * KIB, fd));
			close(fd);
		}
	}
	for (int i = 0; i < 16; i++) { /* mapped, freed, taken again */
		void *at;

		if (make_memory(&second, quota / 8, &memory) != NV_OK)
			break;
		fd = open_card();
		if (map(&second, second.device, memory, 0, quota / 8, fd) == NV_OK) {
			at = mmap(NULL, quota / 8, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
			kept += at != MAP_FAILED;
		}
		rm_free(&second, memory);
	}
	take_the_rest();
	snprintf(note, sizeof(note), "; own memory %s, %d mappings whose memory was freed", mapped ? "mapped" : "not mapped",
		 kept);
}

static const struct mode modes[] = {
	{ "debug", debug },
	{ "suspend", suspend },
	{ "others", profile_others },
	{ "flush", flush },
	{ "many-flushes", NULL, many_flushes },
	{ "unread", unread_bytes },
	{ "ties", ties },
	{ "maps", maps },
	{ 0 },
};

int main(int argc, char **argv)
{
	return run(argc, argv, modes);
}
