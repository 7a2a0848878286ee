// SPDX-License-Identifier: GPL-2.0
/*
 * os_event.c - a pod's OS events. RM keeps them by client and number in one list, and asks nobody whose they are: who
 * frees a neighbour's makes it wait for ever. RM walks the list under a spinlock, so a pod may have only so many.
 */
#include "client.h"
#include "os_event.h"

/* A CUDA process has about thirty. Those of a client that is freed count until their file is closed. */
#define MOST_EVENTS	2048

static long answer(struct qgpu_call *call, u32 status)
{
	return qgpu_call_answer(call, offsetof(struct nv_os_event, status), status);
}

long qgpu_os_event(struct qgpu_call *call)
{
	int more = call->nr == NV_ESC_ALLOC_OS_EVENT ? 1 : -1;
	long ret;

	if (!READ_ONCE(call->pod->gone)) {
		if (qgpu_client_pod(call->in.os_event.client) != call->pod->id)
			return answer(call, NV_ERR_INVALID_CLIENT);
		if (more > 0 && atomic_read(&call->pod->nr_os_events) >= MOST_EVENTS)
			return answer(call, NV_ERR_INSUFFICIENT_RESOURCES);
	}
	ret = qgpu_call_forward(call);
	if (!ret && call->out.os_event.status == NV_OK) {
		atomic_add(more, &call->pod->nr_os_events);
		atomic_add(more, &call->file->nr_os_events);
	}
	return ret;
}
