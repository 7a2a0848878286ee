// SPDX-License-Identifier: GPL-2.0
/*
 * monitors.c - a program that floods the card and meanwhile has the card's performance monitors to itself: holds them,
 * streams them into memory, and asks for their registers, and for others.
 */
#include <sys/wait.h>

#include "profile.h"

struct stream {
	uint32_t buffer, pad;
	uint64_t offset, size;
	uint32_t available, pad2;
	uint64_t available_offset;
	uint8_t switched, pad3[3];
	uint32_t index;
	uint64_t address;
};

/* Reserve the monitors, of the whole card or with the context, and bind them to the profiler. */
static long bind_monitors(const struct rm *of, uint32_t handle, uint8_t switched)
{
	long status = ask_profiler(of, handle, RESERVE_SMPC, &switched, 1);

	status = status ?: ask_profiler(of, handle, RESERVE_HWPM, &switched, 1);
	return status ?: ask_profiler(of, handle, BIND, NULL, 0);
}

static void release_monitors(const struct rm *of, uint32_t handle)
{
	ask_profiler(of, handle, UNBIND, NULL, 0);
	ask_profiler(of, handle, RELEASE_HWPM, NULL, 0);
	ask_profiler(of, handle, RELEASE_SMPC, NULL, 0);
}

static long make_stream(const struct rm *of, uint32_t buffer, uint64_t offset, uint64_t size, uint32_t available,
			uint32_t *index)
{
	static struct stream *stream;
	long status;

	stream = stream ?: rm_low(sizeof(*stream));
	*stream = (struct stream){ .buffer = buffer, .offset = offset, .size = size, .available = available };
	status = rm_control(of, rm_plain, of->client, profiler, ALLOC_STREAM, stream, sizeof(*stream));
	*index = stream->index;
	return status;
}

/* All monitors and a stream, held for good while the card is flooded. */
static void reserve(void)
{
	struct { uint64_t consumed; uint8_t update, wait, pad[6]; uint64_t available; uint8_t put, pad2[7]; uint64_t at;
		 uint32_t index, pad3; } update = { .update = 1, .put = 1 };
	static uint32_t buffer, available, index;

	if (!buffer) {
		make_memory(&second, 2 * MIB, &buffer);
		make_memory(&second, 64 * KIB, &available);
		long streamed = make_stream(&second, buffer, 0, 2 * MIB, available, &index);
		long bound = bind_monitors(&second, profiler, 0);

		grant(streamed);
		grant(bound);
		snprintf(note, sizeof(note), "; stream %#lx, monitors %#lx", streamed, bound);
	}
	update.index = index;
	grant(ask_profiler(&second, profiler, UPDATE_STREAM, &update, sizeof(update)));
}

/* Monitors that a killed process held: another one must get them. */
static void outlive(void)
{
	static _Atomic long *bound;
	static int killed;
	double until;
	long status;
	pid_t pid;

	bound = bound ?: mmap(NULL, sizeof(*bound), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	*bound = ~0u;
	pid = fork();
	if (!pid) {
		struct rm first, further = { .last = 0x5e000000 };
		uint32_t handle;

		status = rm_try_open(&first);
		further.ctl = first.ctl;
		status = status ?: rm_make(&further);
		status = status ?: make_profiler(&further, 0, 0, &handle);
		*bound = status ?: bind_monitors(&further, handle, 0);
		hold();
	}
	for (until = now_s() + 2; *bound == ~0u && now_s() < until;)
		usleep(10000);
	kill(pid, SIGKILL);
	waitpid(pid, NULL, 0);
	if (!grant(*bound)) {
		snprintf(note, sizeof(note), "; the other process got no monitors (%#lx)", (long)*bound);
		return;
	}
	snprintf(note, sizeof(note), "; %d processes killed that held monitors", ++killed);
	until = now_s() + 5;
	while ((status = bind_monitors(&second, profiler, 0)) != NV_OK && now_s() < until) {
		release_monitors(&second, profiler);
		usleep(50000);
	}
	if (!grant(status)) {
		reached++;
		snprintf(note, sizeof(note), "; monitors still held by a dead process (%#lx)", status);
	}
	release_monitors(&second, profiler);
}

/* Streams beyond their memory, into what is no memory, and into memory that is freed and taken again. */
static void streams(void)
{
	uint32_t small, available, large, index;
	const uint32_t others[] = { second.subdevice, second.client, 0x5c000005, 0x5c00009f };
	int kept = 0;

	if (make_memory(&second, 64 * KIB, &small) != NV_OK || make_memory(&second, 64 * KIB, &available) != NV_OK)
		return;
	if (grant(make_stream(&second, small, 0, 64 * KIB, available, &index)))
		grant(ask_profiler(&second, profiler, FREE_STREAM, &index, sizeof(index)));
	reach(make_stream(&second, small, 0, 0xffe00000, available, &index));
	reach(make_stream(&second, small, 1ull << 40, 64 * KIB, available, &index));
	reach(make_stream(&second, small, ~0ull - 4095, 64 * KIB, available, &index));
	for (size_t i = 0; i < sizeof(others) / sizeof(others[0]); i++)
		reach(make_stream(&second, others[i], 0, 64 * KIB, available, &index));
	for (int i = 0; i < 8; i++) {
		if (make_memory(&second, quota / 8, &large) != NV_OK)
			break;
		kept += make_stream(&second, large, 0, quota / 8 & ~0xfffffull, available, &index) == NV_OK;
		rm_free(&second, large);
	}
	take_the_rest();
	snprintf(note, sizeof(note), "; %d streams whose memory was freed", kept);
}

/* Profilers without end, each with what the driver takes for it, beside a full limit. */
static void objects(void)
{
	uint32_t handle, index, buffer, available, made = 0;
	uint32_t first = profiler;

	make_memory(&second, 2 * MIB, &buffer);
	make_memory(&second, 64 * KIB, &available);
	take_the_rest();
	for (int i = 0; i < 256 && grant(make_profiler(&second, i % 2 ? rm.client : 0, i % 2 ? tsg : 0, &handle)); i++) {
		profiler = handle;
		made += make_stream(&second, buffer, 0, 2 * MIB, available, &index) == NV_OK;
		bind_monitors(&second, profiler, i % 2);
	}
	profiler = first;
	snprintf(note, sizeof(note), "; %u streams", made);
	told();
	hold();
}

struct reg_op {
	uint8_t op, type, status, quad;
	uint32_t group, subgroup, offset, high, low, and_high, and_low;
};

struct reg_ops {
	uint32_t count, mode;
	uint8_t passed, direct, pad[2];
	struct reg_op ops[124];
};

_Static_assert(sizeof(struct reg_ops) == 3980, "NVB0CC_CTRL_EXEC_REG_OPS_PARAMS");

/* A counter's register, as recorded of ncu. */
#define LISTED 0x13cc14

static uint32_t last_through;
static int wrote;

static long exec_reg_ops(struct reg_ops *ops)
{
	return rm_control(&second, rm_plain, second.client, profiler, EXEC_REG_OPS, ops, sizeof(*ops));
}

/*
 * Registers of the card's identity, bus and scheduler, those of memory, the context switch and others, and all of them,
 * beside one that is a counter's. All are read; some are written, by a mask that changes no bit, so that a card whose
 * firmware lets that through is not harmed.
 */
static const uint32_t offsets[] = { 0x0, 0x200, 0x2630, 0x2200, 0x2254, 0x100c80, 0x9400, 0x88000, 0x400100,
				    0x409614, 0x409800, 0x41a100, 0x610000, 0xb80000, 0xfffffc };
enum { NR = sizeof(offsets) / sizeof(offsets[0]), NR_LOW = 5 };

static int is_written(uint32_t offset)
{
	return offset < 0x2200 || offset == 0x100c80;
}

/* Returns whether the counter's register was read. */
static int ask_registers(struct reg_ops *ops, uint32_t first, uint32_t end, uint8_t type, uint8_t op)
{
	uint32_t nr = end - first;

	*ops = (struct reg_ops){ .count = nr + 1, .mode = 1 };
	for (uint32_t i = 0; i < nr; i++)
		ops->ops[i] = (struct reg_op){ .op = is_written(offsets[first + i]) ? op : 0, .type = type, .status = ~0,
					       .offset = offsets[first + i] };
	ops->ops[nr] = (struct reg_op){ .type = type, .status = ~0, .offset = LISTED };
	if (!grant(exec_reg_ops(ops)))
		return 0;
	for (uint32_t i = 0; i < nr; i++) {
		if (!reach(ops->ops[i].status))
			continue;
		last_through = offsets[first + i];
		wrote |= ops->ops[i].op;
	}
	return !ops->ops[nr].status;
}

static void registers(void)
{
	static const uint32_t spans[][2] = { { 0, NR_LOW }, { NR_LOW, NR }, { 0, NR }, { 0, 0 } };
	static struct reg_ops *ops;
	uint32_t listed = 0;

	ops = ops ?: rm_low(sizeof(*ops));
	for (uint8_t switched = 0; switched < 2; switched++) {
		int bound = grant(bind_monitors(&second, profiler, switched));

		for (uint8_t type = 0; type < 2; type++) {
			for (uint8_t op = 0; op < 2; op++) { /* READ_32, WRITE_32 */
				for (uint32_t i = 0; i < sizeof(spans) / sizeof(spans[0]); i++)
					listed += ask_registers(ops, spans[i][0], spans[i][1], type, op);
			}
		}
		*ops = (struct reg_ops){ .count = 1 << 20, .mode = 1 };
		reach(exec_reg_ops(ops));
		if (bound)
			release_monitors(&second, profiler);
	}
	snprintf(note, sizeof(note), "; a counter's register read %u times of 32; the last that was let through: %#x%s", listed,
		 last_through, wrote ? ", one written" : "");
}

static void *many_registers(void *nothing)
{
	struct reg_ops *ops = rm_low(sizeof(*ops));

	for (;;) {
		*ops = (struct reg_ops){ .count = 124, .mode = 1 };
		for (int i = 0; i < 124; i++)
			ops->ops[i] = (struct reg_op){ .type = 1, .offset = LISTED };
		if (!grant(exec_reg_ops(ops)))
			usleep(1000);
	}
	return nothing;
}

static const struct mode modes[] = {
	{ "reserve", reserve },
	{ "outlive", outlive },
	{ "streams", streams },
	{ "objects", objects },
	{ "registers", registers },
	{ "many-registers", reserve, many_registers },
	{ 0 },
};

int main(int argc, char **argv)
{
	return run(argc, argv, modes);
}
