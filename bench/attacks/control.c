// SPDX-License-Identifier: GPL-2.0
/*
 * control.c - a program that floods the card and meanwhile asks RM for more than its share, or for its neighbour to
 * have less. It says what RM answered; what it gained, its neighbour's steps say.
 *
 * On a real card the flood is CUDA's, and the handles are learned by listening to libcuda's own ioctls; on the simulated
 * card of the VM lanes the flood is that driver's own call.
 */
#include <pthread.h>

#include "cu.h"
#include "rm.h"

static struct rm rm;
static uint32_t tsg, channels[64], nr_channels;
/* What channels are asked for as, and their TSG's engine, where libcuda's words are to be changed. */
static uint32_t channel_class, group_engine;

/* What is done to libcuda's wish that its compute be preempted at any instruction. */
static enum { LEAVE, DROP, WAIT_FOR_IDLE } preemption;

/* Tell whether the call is dropped. */
static bool change_control(NVOS54_PARAMETERS *call)
{
	NV2080_CTRL_GR_SET_CTXSW_PREEMPTION_MODE_PARAMS *mode = (void *)(uintptr_t)call->params;

	if (!preemption || call->cmd != NV2080_GR_SET_CTXSW_PREEMPTION_MODE)
		return false;
	if (preemption == WAIT_FOR_IDLE)
		mode->cilpPreemptMode = 0;
	call->status = NV_OK;
	return preemption == DROP;
}

static void change(NVOS64_PARAMETERS *call)
{
	NV_CHANNEL_GROUP_ALLOCATION_PARAMETERS *group = (void *)(uintptr_t)call->pAllocParms;

	if (channel_class && (call->hClass & 0xff) == 0x6f)
		call->hClass = channel_class;
	if (group_engine && (call->hClass & 0xff) == 0x6f && call->pAllocParms) {
		uint32_t *engine = (uint32_t *)(uintptr_t)(call->pAllocParms + 128); /* NV_CHANNEL_ALLOC_PARAMS */

		*engine = *engine == 1 ? group_engine : *engine;
	}
	if (group_engine && call->hClass == KEPLER_CHANNEL_GROUP_A && group && group->engineType == 1)
		group->engineType = group_engine;
}

/* libcuda finds this in place of libc's: the program exports it. */
int ioctl(int fd, unsigned long request, ...)
{
	const NVOS64_PARAMETERS *call;
	va_list arguments;
	void *argument;
	long result;

	va_start(arguments, request);
	argument = va_arg(arguments, void *);
	va_end(arguments);
	if ((request & 0xff) == NV_ESC_RM_ALLOC && (request >> 16 & 0x3fff) == sizeof(*call))
		change(argument);
	if ((request & 0xff) == NV_ESC_RM_CONTROL && (request >> 16 & 0x3fff) == sizeof(NVOS54_PARAMETERS) &&
	    change_control(argument))
		return 0;
	result = syscall(SYS_ioctl, fd, request, argument);
	if (result < 0 || (request & 0xff) != NV_ESC_RM_ALLOC || (request >> 16 & 0x3fff) != sizeof(*call))
		return (int)result;
	call = argument;
	if (call->status != NV_OK)
		return (int)result;
	if (call->hClass == KEPLER_CHANNEL_GROUP_A) {
		const NV_CHANNEL_GROUP_ALLOCATION_PARAMETERS *group = (void *)(uintptr_t)call->pAllocParms;

		if (group && group->engineType == 1) {
			rm.ctl = fd;
			rm.client = call->hRoot;
			rm.device = call->hObjectParent;
			tsg = call->hObjectNew;
			nr_channels = 0;
		}
	} else if (call->hClass == NV20_SUBDEVICE_0) {
		rm.subdevice = call->hObjectNew;
	} else if (tsg && call->hObjectParent == tsg && (call->hClass & 0xff) == 0x6f && nr_channels < 64) {
		channels[nr_channels++] = call->hObjectNew;
	}
	return (int)result;
}

static int refused_by_cuda;
static bool churn;
static volatile uint32_t contexts;

static void *cuda_flood(void *nothing)
{
	static uint64_t rounds = 100000;
	void *parameters[] = { &rounds };
	void *function, *context;

	if (preemption)
		rounds *= 2000; /* kernels of a second and more */
	if (channel_class || group_engine || preemption)
		refused_by_cuda = CU(cuInit, 0) ?: CU(cuCtxCreate_v2, &context, 0, 0);
	else
		cu_open();
	if (refused_by_cuda)
		return nothing;
	function = cu_kernel("spin");
	while (churn) { /* contexts that end with a kernel of a second under way, for what is freed is let run */
		rounds = 100000 * 1000;
		cu_launch(function, parameters);
		context = NULL;
		CU(cuCtxGetCurrent, &context);
		CU(cuCtxDestroy_v2, context);
		cu_open();
		function = cu_kernel("spin");
		contexts++;
	}
	for (;;) {
		for (int i = 0; i < 50; i++)
			cu_launch(function, parameters);
		if (CU(cuCtxSynchronize))
			return nothing;
	}
}

/* tests/vm/simnv: SIM_ESC_SUBMIT, an endless queue of kernels of 1 ms */
static void sim_flood(void)
{
	struct { uint32_t client, channel; uint64_t kernel_ns, count, period_ns; } work = { .kernel_ns = 1000000,
											    .count = ~0ull };
	NV_CHANNEL_GROUP_ALLOCATION_PARAMETERS group = { .engineType = 1 };
	static uint8_t channel[368];

	rm_open(&rm);
	tsg = ++rm.last;
	rm_alloc(&rm, rm_plain, rm.device, KEPLER_CHANNEL_GROUP_A, &group, &tsg);
	channels[0] = ++rm.last;
	rm_alloc(&rm, rm_plain, tsg, 0xc86f, channel, &channels[0]);
	nr_channels = 1;
	work.client = rm.client;
	work.channel = channels[0];
	rm_plain(rm.ctl, 0xf0, &work, sizeof(work));
}

static _Atomic unsigned int answers[4], calls; /* OK, refused for want of permission, other, call failed */

static void ask(rm_way way, uint32_t client, uint32_t object, uint32_t cmd, const void *params, uint32_t size)
{
	static __thread uint8_t *low;
	long status;

	low = low ?: rm_low(4096);
	memcpy(low, params, size);
	status = rm_control(&rm, way, client, object, cmd, low, size);
	answers[status < 0 ? 3 : status == NV_OK ? 0 : status == NV_ERR_INSUFFICIENT_PERMISSIONS ? 1 : 2]++;
	calls++;
}

static void long_turns(uint32_t client, uint32_t object)
{
	static const rm_way ways[] = { rm_plain, rm_wrapped, rm_odd, rm_high, rm_i386 };
	uint64_t us = 1000000;

	for (size_t i = 0; i < sizeof(ways) / sizeof(ways[0]); i++)
		ask(ways[i], client, object, NVA06C_SET_TIMESLICE, &us, sizeof(us));
}

static void preempt(rm_way way, uint32_t client, NVA06C_CTRL_PREEMPT_PARAMS params)
{
	ask(way, client, tsg, NVA06C_PREEMPT, &params, sizeof(params));
}

static const NVA06C_CTRL_PREEMPT_PARAMS end_turn = { .bWait = 1 };

/* One's own turn given away, which is allowed: it must cost nobody else anything, and the card's locks are everybody's. */
static void *preempt_self(void *nothing)
{
	for (;;)
		preempt(rm_plain, rm.client, end_turn);
	return nothing;
}

static void priority(void)
{
	uint32_t high = 2;
	uint8_t yes[8] = { 1 };
	struct { uint32_t channel, property; uint64_t value; } slice = { channels[0], 0, 1000000 };

	ask(rm_plain, rm.client, tsg, 0xa06c0107, &high, sizeof(high));
	ask(rm_plain, rm.client, tsg, 0xa06c0110, yes, 1);
	preempt(rm_plain, rm.client, end_turn);
	preempt(rm_plain, rm.client, (NVA06C_CTRL_PREEMPT_PARAMS){ .bWait = 0 });
	preempt(rm_plain, rm.client, (NVA06C_CTRL_PREEMPT_PARAMS){ 1, .bManualTimeout = 1, .timeoutUs = 1000000 });
	for (uint32_t i = 0; i < nr_channels; i++) {
		ask(rm_plain, rm.client, channels[i], 0xa06f0109, &high, sizeof(high));
		ask(rm_plain, rm.client, channels[i], 0xa06f0111, yes, 2);
		slice.channel = channels[i];
		ask(rm_plain, rm.client, rm.device, 0x80170f, &slice, sizeof(slice));
	}
}

static void channels_of(uint32_t client, bool disable, rm_way way)
{
	static NV2080_CTRL_FIFO_DISABLE_CHANNELS_PARAMS params;

	params = (NV2080_CTRL_FIFO_DISABLE_CHANNELS_PARAMS){ .bDisable = disable, .numChannels = nr_channels };
	for (uint32_t i = 0; i < nr_channels; i++) {
		params.hClientList[i] = client;
		params.hChannelList[i] = channels[i];
	}
	ask(way, rm.client, rm.subdevice, NV2080_FIFO_DISABLE_CHANNELS, &params, sizeof(params));
}

/* Neighbours are the clients around one's own, and the same library gives the same handles. */
static void neighbours(void)
{
	for (uint32_t off = 1; off <= 24; off++) {
		channels_of(rm.client - off, true, rm_plain);
		channels_of(rm.client - off, true, rm_wrapped);
	}
}

static void preempt_neighbours(void)
{
	for (uint32_t off = 1; off <= 24; off++) {
		preempt(rm_plain, rm.client - off, end_turn);
		preempt(rm_wrapped, rm.client - off, end_turn);
		ask(rm_plain, rm.client - off, tsg, NVA06C_PREEMPT | 0x8000, &end_turn, sizeof(end_turn));
	}
}

static void names(void)
{
	uint64_t us = 1;
	uint8_t block[332] = { 0 };

	for (uint32_t off = 1; off <= 24; off++) {
		struct rm theirs = rm;

		theirs.client = rm.client - off;
		ask(rm_plain, theirs.client, tsg, NVA06C_SET_TIMESLICE, &us, sizeof(us));
		ask(rm_plain, theirs.client, tsg, 0xa06c0101, block, 2);
		/* a control that goes to the firmware without a look whose client it names; libcuda asks it at start */
		ask(rm_plain, theirs.client, rm.subdevice, 0x20808159, block, sizeof(block));
		rm_free(&theirs, tsg);
		rm_free(&theirs, channels[0]);
		rm_free(&theirs, theirs.client);
	}
}

/* Have the gate opened for a free that comes to nothing: through a file that has none of the clients. */
static void free_nothing(void)
{
	struct rm bare = rm;

	bare.ctl = open("/dev/nvidiactl", O_RDWR);
	for (double until = now_s() + 0.1; now_s() < until; calls += 3) {
		rm_free(&bare, tsg);
		rm_free(&bare, rm.device);
		rm_free(&bare, rm.client);
	}
	close(bare.ctl);
}

static void start_self(void)
{
	uint8_t enable[2] = { 1 };

	ask(rm_plain, rm.client, tsg, 0xa06c0101, enable, 2);
	for (uint32_t i = 0; i < nr_channels; i++)
		ask(rm_plain, rm.client, channels[i], 0xa06f0103, enable, 2);
}

/* Every control that the rules name, with nothing in it that would harm a card where the rules fail. */
static void every_control(void)
{
	static const uint32_t sizes[] = { 1, 2, 4, 8, 12, 16, 24, 32, 536 };
	uint8_t nothing[536] = { 0 };

	for (size_t i = 0; i < sizeof(refused_controls) / sizeof(refused_controls[0]); i++) {
		uint32_t cmd = refused_controls[i].cmd;
		uint32_t object = cmd >> 16 == 0xa06c ? tsg : cmd >> 16 == 0xa06f ? channels[0] :
				  cmd >> 16 == 0x80 ? rm.device : rm.subdevice;

		/* whatever these are given, they stop something */
		if (cmd == 0x801711 || cmd == 0x20801110 || cmd == 0x2080012c)
			continue;
		for (size_t j = 0; j < sizeof(sizes) / sizeof(sizes[0]); j++)
			ask(rm_plain, rm.client, object, cmd, nothing, sizes[j]);
	}
}

static NVOS54_PARAMETERS *raced;
static volatile bool stop;

static void *flip_command(void *nothing)
{
	while (!stop) {
		*(volatile uint32_t *)&raced->cmd = NVA06C_GET_TIMESLICE;
		for (volatile int spin = 0; spin < 400; spin++)
			;
		*(volatile uint32_t *)&raced->cmd = NVA06C_SET_TIMESLICE;
		for (volatile int spin = 0; spin < 400; spin++)
			;
	}
	return nothing;
}

/* Asked as a question, carried out as an order. */
static void race(double seconds)
{
	uint64_t *us = rm_low(sizeof(*us));
	double until = now_s() + seconds;
	pthread_t thread;

	raced = rm_low(sizeof(*raced));
	pthread_create(&thread, NULL, flip_command, NULL);
	while (now_s() < until) {
		*us = 1000000;
		*raced = (NVOS54_PARAMETERS){ .hClient = rm.client, .hObject = tsg, .cmd = NVA06C_GET_TIMESLICE,
					      .params = (uintptr_t)us, .paramsSize = sizeof(*us), .status = ~0u };
		rm_plain(rm.ctl, NV_ESC_RM_CONTROL, raced, sizeof(*raced));
		answers[raced->status == NV_OK ? 0 : raced->status == NV_ERR_INSUFFICIENT_PERMISSIONS ? 1 : 2]++;
		calls++;
	}
	stop = true;
	pthread_join(thread, NULL);
}

int main(int argc, char **argv)
{
	const char *mode = start(argc, argv);
	double until;
	pthread_t thread;

	if (argc > 4 && !strcmp(argv[4], "sim")) {
		sim_flood();
	} else {
		channel_class = !strcmp(mode, "old-channels") ? 0x906f : 0;
		preemption = !strcmp(mode, "no-wish") ? DROP : !strcmp(mode, "wait-for-idle") ? WAIT_FOR_IDLE : LEAVE;
		churn = !strcmp(mode, "churn");
		group_engine = !strcmp(mode, "copy-group") ? 9 : 0; /* COPY0, on the compute engine's runlist */
		pthread_create(&thread, NULL, cuda_flood, NULL);
		sleep(2);
	}
	if ((channel_class || group_engine || preemption) && refused_by_cuda) { /* which is what ought to come of it */
		report("CUDA is refused: %d", refused_by_cuda);
		hold();
	}
	while (churn && contexts < 3) /* who cannot make another one proves nothing */
		usleep(20000);
	if (!tsg || !nr_channels) {
		report("cannot start: libcuda's TSG was not seen");
		return 4;
	}
	report("flooding; client %#x TSG %#x, %u channels", rm.client, tsg, nr_channels);
	for (int i = 0; i < 4 && !strcmp(mode, "preempt-self"); i++)
		pthread_create(&thread, NULL, preempt_self, NULL);
	until = now_s() + 3600;
	while (now_s() < until) {
		if (!strcmp(mode, "timeslice"))
			long_turns(rm.client, tsg);
		else if (!strcmp(mode, "priority"))
			priority();
		else if (!strcmp(mode, "neighbours"))
			neighbours();
		else if (!strcmp(mode, "preempt-neighbours"))
			preempt_neighbours();
		else if (!strcmp(mode, "names"))
			names();
		else if (!strcmp(mode, "open-gate"))
			channels_of(rm.client, false, rm_plain), channels_of(rm.client, false, rm_wrapped);
		else if (!strcmp(mode, "free-nothing"))
			free_nothing();
		else if (!strcmp(mode, "start-self"))
			start_self();
		else if (!strcmp(mode, "every-control"))
			every_control();
		else if (!strcmp(mode, "race"))
			stop = false, race(1);
		report("%u controls: %u ok, %u not permitted, %u other, %u failed calls; %u channels, %u contexts", calls,
		       answers[0], answers[1], answers[2], answers[3], nr_channels, contexts + 1);
		usleep(20000);
	}
	return 0;
}
