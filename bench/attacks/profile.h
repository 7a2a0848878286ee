/* SPDX-License-Identifier: GPL-2.0 */
/*
 * profile.h - the calls of debuggers and profilers beside a flood, and how attacks with them are counted.
 *
 * Counted is what RM granted of the calls that need --allow-profiling, and what a call reached that no pod may reach. The
 * judge wants the first in a pod with that grant and in no other pod, and the second in none.
 */
#ifndef _PROFILE_H
#define _PROFILE_H

#include "flood.h"

/* Calls of 0xB0CC and of firmware, by what RM's headers call them, or by number where they have no name. */
#define RESERVE_HWPM	0xb0cc0101
#define RELEASE_HWPM	0xb0cc0102
#define RESERVE_SMPC	0xb0cc0103
#define RELEASE_SMPC	0xb0cc0104
#define ALLOC_STREAM	0xb0cc0105
#define FREE_STREAM	0xb0cc0106
#define BIND		0xb0cc0107
#define UNBIND		0xb0cc0108
#define UPDATE_STREAM	0xb0cc0109
#define EXEC_REG_OPS	0xb0cc010a
#define REQUEST_POWER	0xb0cc0301
#define PROFILER	0xb2cc
#define DEBUGGER	0x83de

/* As for ncu, the guardian makes this client: on libcuda's file, which has one already. */
static struct rm second = { .last = 0x5e000000 };
static uint32_t profiler;
static uint32_t neighbours[256], nr_neighbours;

static _Atomic unsigned int granted, reached, refused;
static long last;
static char note[128];

static bool counted(long status, _Atomic unsigned int *as)
{
	if (status != NV_OK) {
		refused++;
		last = status;
		return false;
	}
	(*as)++;
	return true;
}

/* Count a call that needs the grant. */
static bool grant(long status)
{
	return counted(status, &granted);
}

/* Count a call that no pod may make. */
static bool reach(long status)
{
	return counted(status, &reached);
}

static void told(void)
{
	report("granted %u, reached %u, refused %u (last %#lx)%s; client %#x TSG %#x, %u channels; %u others' clients named",
	       granted, reached, refused, last, note, rm.client, tsg, nr_channels, nr_neighbours);
}

static bool is_own(uint32_t client)
{
	for (uint32_t i = 0; i < nr_own; i++)
		if (own_clients[i] == client)
			return true;
	return !client;
}

/* The clients between two that the judge made around the neighbour's, and those before one's own. */
static void find_neighbours(const char *range)
{
	char *end = NULL;
	uint32_t first = strtoul(range, &end, 0), until = end && *end == '-' ? strtoul(end + 1, NULL, 0) : 0;

	for (uint32_t client = first + 1; client < until && nr_neighbours < 128; client++)
		if (!is_own(client))
			neighbours[nr_neighbours++] = client;
	for (uint32_t off = 1; off <= 24; off++)
		if (!is_own(rm.client - off))
			neighbours[nr_neighbours++] = rm.client - off;
}

static long ask_profiler(const struct rm *of, uint32_t object, uint32_t cmd, const void *params, uint32_t size)
{
	static __thread uint8_t *low;

	low = low ?: rm_low(32768);
	if (size)
		memcpy(low, params, size);
	return rm_control(of, rm_plain, of->client, object, cmd, size ? low : NULL, size);
}

static long make_profiler(struct rm *of, uint32_t client, uint32_t context, uint32_t *handle)
{
	struct { uint32_t client, context; } target = { client, context };

	*handle = ++of->last;
	return rm_alloc(of, rm_plain, of->subdevice, PROFILER, &target, handle);
}

static long make_memory(struct rm *of, uint64_t size, uint32_t *handle)
{
	*handle = ++of->last;
	return rm_memory(of, rm_plain, size, handle);
}

/* Plainly, as ncu does: whoever is refused this proves nothing by what it is refused besides. */
static void begin(void)
{
	static const uint32_t features[3] = { 0, 0x545, 0 }; /* as recorded */

	if (grant(make_profiler(&second, rm.client, tsg, &profiler)) || grant(make_profiler(&second, 0, 0, &profiler)))
		grant(ask_profiler(&second, profiler, REQUEST_POWER, features, sizeof(features)));
}

static void take_the_rest(void)
{
	uint32_t handle;

	for (uint64_t size = quota / 2; size >= 64 * KIB; size /= 2)
		while (make_memory(&second, size, &handle) == NV_OK)
			;
}

struct mode {
	const char *name;
	/* Done over and over, beside the threads of a flood. */
	void (*attack)(void);
	void *(*thread)(void *);
};

/* Flood the card, make a profiler as ncu does, and attack by the mode that the command names. */
static int run(int argc, char **argv, const struct mode *modes)
{
	const char *name = start(argc, argv);
	pthread_t thread;
	long status;

	flood(argc, argv);
	flood_is_seen();
	rm.last = 0x5d000000;
	second.ctl = rm.ctl;
	status = rm_make(&second);
	if (status != NV_OK) {
		report("cannot start: no further client (RM says %#lx, errno %d)", status, errno);
		return 4;
	}
	note_own(second.client);
	find_neighbours(argc > 4 ? argv[4] : "");
	begin();
	while (modes->name && strcmp(name, modes->name))
		modes++;
	for (int i = 0; i < 4 && modes->thread; i++)
		pthread_create(&thread, NULL, modes->thread, NULL);
	while (modes->name) {
		if (modes->attack)
			modes->attack();
		told();
		usleep(20000);
	}
	report("cannot start: no mode %s", name);
	return 2;
}

#endif
