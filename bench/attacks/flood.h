/* SPDX-License-Identifier: GPL-2.0 */
/*
 * flood.h - a flood on the card, and the objects that carry it, for programs that attack with channels of their own.
 *
 * On a real card the flood is CUDA's, and the handles are learned by listening to libcuda's own ioctls; on the simulated
 * card of the VM lanes the flood is that driver's own call.
 */
#ifndef _FLOOD_H
#define _FLOOD_H

#include <pthread.h>

#include "cu.h"
#include "rm.h"

static struct rm rm;
static uint32_t tsg, channels[64], nr_channels, compute;
/* Clients of this process. */
static uint32_t own_clients[64], nr_own;
/* The class of channels and the engine of their TSG that replace those that libcuda asks for; 0: leave them. */
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

static void note_own(uint32_t client)
{
	if (nr_own < sizeof(own_clients) / sizeof(own_clients[0]))
		own_clients[nr_own++] = client;
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
	if (call->hClass <= NV01_ROOT_NON_PRIV || call->hClass == NV01_ROOT_CLIENT) {
		note_own(call->hObjectNew);
	} else if (call->hClass == KEPLER_CHANNEL_GROUP_A) {
		const NV_CHANNEL_GROUP_ALLOCATION_PARAMETERS *group = (void *)(uintptr_t)call->pAllocParms;

		if (group && group->engineType == (group_engine ?: 1)) {
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
	} else if ((call->hClass & 0xff) == 0xc0) {
		compute = call->hObjectNew;
	}
	return (int)result;
}

static int refused_by_cuda;
static bool churn, churn_briefly;
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
	while (churn) { /* each context ends while a kernel of a second runs, because the gate of what is freed opens */
		rounds = 100000 * (churn_briefly ? 150 : 1000);
		cu_launch(function, parameters);
		if (churn_briefly) /* or after its only kernel, because gates of what is new are open */
			CU(cuCtxSynchronize);
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
	note_own(rm.client);
	tsg = ++rm.last;
	rm_alloc(&rm, rm_plain, rm.device, KEPLER_CHANNEL_GROUP_A, &group, &tsg);
	channels[0] = ++rm.last;
	rm_alloc(&rm, rm_plain, tsg, 0xc86f, channel, &channels[0]);
	nr_channels = 1;
	work.client = rm.client;
	work.channel = channels[0];
	rm_plain(rm.ctl, 0xf0, &work, sizeof(work));
}

/* Start the flood, as the fourth argument says: on the simulated card, or on a real one. */
static void flood(int argc, char **argv)
{
	pthread_t thread;

	if (argc > 4 && !strcmp(argv[4], "sim")) {
		sim_flood();
		return;
	}
	pthread_create(&thread, NULL, cuda_flood, NULL);
	sleep(2);
}

/* What attacks with channels of its own proves nothing without any. */
static void flood_is_seen(void)
{
	for (int i = 0; i < 500 && !(tsg && nr_channels); i++)
		usleep(10000); /* a context may just be made */
	if (!tsg || !nr_channels) {
		report("cannot start: libcuda's TSG was not seen");
		exit(4);
	}
}

#endif
