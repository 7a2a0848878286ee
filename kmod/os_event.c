// SPDX-License-Identifier: GPL-2.0
/*
 * os_event.c - a pod's OS events. RM keeps them by client and number in one list, and asks nobody whose they are: who
 * frees a neighbour's makes it wait for ever. RM walks the list under a spinlock, so a pod may have only so many.
 *
 * RM frees an event through any file, so this file keeps them by client and number too. When a file is closed RM frees
 * the events that were made on it; driver_file.c forgets them then.
 */
#include "client.h"
#include "os_event.h"

/* A CUDA process has about thirty. Those of a client that is freed count until their file is closed. */
#define MOST_EVENTS	2048

static long answer(struct qgpu_call *call, u32 status)
{
	return qgpu_call_answer(call, offsetof(struct nv_os_event, status), status);
}

static unsigned long key_of(const struct qgpu_call *call)
{
	return (unsigned long)call->in.os_event.client << 32 | call->in.os_event.number;
}

/* Whatever the call returns: see qgpu_call_forward(). */
static bool is_done(const struct qgpu_call *call)
{
	return call->out.os_event.status == NV_OK;
}

static void forget(struct qgpu_call *call)
{
	if (xa_erase(&call->pod->os_events, key_of(call)))
		atomic_dec(&call->pod->nr_os_events);
}

/*
 * RM no longer had the event that the entry was of. If that one's file was closed meanwhile, the entry has gone too. RM
 * has made the new event, so noting it must not fail.
 */
static void note_again(struct qgpu_call *call)
{
	if (!xa_store(&call->pod->os_events, key_of(call), call->file, GFP_KERNEL_ACCOUNT | __GFP_NOFAIL))
		atomic_inc(&call->pod->nr_os_events);
}

/* An event is noted before RM makes it: what cannot be noted is refused. A removed pod may have more than are noted. */
static long make_event(struct qgpu_call *call)
{
	struct qgpu_pod *pod = call->pod;
	int error = -ENOSPC;
	long ret;

	WRITE_ONCE(call->file->made_os_events, true);
	if (atomic_read(&pod->nr_os_events) < MOST_EVENTS)
		error = xa_insert(&pod->os_events, key_of(call), call->file, GFP_KERNEL_ACCOUNT);
	if (!error)
		atomic_inc(&pod->nr_os_events);
	else if (error != -EBUSY && !READ_ONCE(pod->gone))
		return answer(call, NV_ERR_INSUFFICIENT_RESOURCES);
	ret = qgpu_call_forward(call);
	if (!error && !is_done(call))
		forget(call);
	else if (error == -EBUSY && is_done(call))
		note_again(call);
	return ret;
}

static long free_event(struct qgpu_call *call)
{
	long ret = qgpu_call_forward(call);

	if (is_done(call))
		forget(call);
	return ret;
}

long qgpu_os_event(struct qgpu_call *call)
{
	struct qgpu_pod *pod = call->pod;
	struct qgpu_client *client;
	long ret;

	if (mutex_lock_killable(&pod->parts_lock))
		return -EINTR;
	client = qgpu_client_lock(call->in.os_event.client, pod);
	if (IS_ERR(client))
		ret = PTR_ERR(client);
	else if (!client && !READ_ONCE(pod->gone))
		ret = answer(call, NV_ERR_INVALID_CLIENT);
	else if (call->nr == NV_ESC_ALLOC_OS_EVENT)
		ret = make_event(call);
	else
		ret = free_event(call);
	if (!IS_ERR_OR_NULL(client))
		qgpu_client_unlock(client);
	mutex_unlock(&pod->parts_lock);
	return ret;
}
