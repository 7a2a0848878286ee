// SPDX-License-Identifier: GPL-2.0
/*
 * control.c - a program that floods the card and meanwhile asks RM for more than its share, or for its neighbour to
 * have less. It says what RM answered; what it gained, its neighbour's steps say.
 */
#include "flood.h"

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

	channel_class = !strcmp(mode, "old-channels") ? 0x906f : 0;
	preemption = !strcmp(mode, "no-wish") ? DROP : !strcmp(mode, "wait-for-idle") ? WAIT_FOR_IDLE : LEAVE;
	churn_briefly = !strcmp(mode, "churn-briefly");
	churn = churn_briefly || !strcmp(mode, "churn");
	group_engine = !strcmp(mode, "copy-group") ? 9 : 0; /* COPY0, on the compute engine's runlist */
	flood(argc, argv);
	if ((channel_class || group_engine || preemption) && refused_by_cuda) { /* which is what ought to come of it */
		report("CUDA is refused: %d", refused_by_cuda);
		hold();
	}
	for (int i = 0; i < 2 && churn_briefly; i++)
		pthread_create(&thread, NULL, cuda_flood, NULL);
	while (churn && contexts < 3) /* who cannot make another one proves nothing */
		usleep(20000);
	flood_is_seen();
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
