// SPDX-License-Identifier: GPL-2.0
/*
 * free.c - a pod's frees, by either form of the call: removes the object from the object table once RM says that it is
 * gone. Gates that RM would wait for are opened before.
 */
#include "call.h"
#include "client.h"
#include "free.h"
#include "gate_penalty.h"
#include "rm.h"
#include "tsg.h"
#include "untracked_object.h"

/* Without a seal the pod may have forged the answer. Then RM is asked again, and may have reused the handle already. */
static bool is_gone(const struct qgpu_call *call, struct qgpu_client *client, const struct qgpu_freeing *freeing)
{
	u32 status;

	if (call->sealed) {
		memcpy(&status, (const char *)&call->out + freeing->status_at, sizeof(status));
		return status == NV_OK;
	}
	return qgpu_rm_gone(client->handle, freeing->handle) ||
	       (freeing->handle == client->handle && !qgpu_client_listed(client));
}

/*
 * RM makes graphics contexts, context shares and TSGs by itself, by handles that the pod can ask for. With them it frees
 * channels, of which the object table says nothing. No program frees them.
 */
static bool is_made_by_rm(const struct qgpu_call *call, struct qgpu_client *client, u32 handle)
{
	u32 class;

	return !READ_ONCE(call->pod->gone) && !qgpu_untracked_has(client, handle) &&
	       qgpu_rm_class(client->handle, handle, &class) == NV_OK &&
	       (qgpu_is_registered(class) || class == KERNEL_GRAPHICS_CONTEXT);
}

static bool open_gates(struct qgpu_client *client, u32 handle)
{
	u32 gpus = 0;
	bool held = qgpu_objects_hold(client, handle, &gpus);

	qgpu_tsgs_wait(gpus);
	return held;
}

/*
 * The gates of objects that go away are opened first. Otherwise RM would wait for channels that cannot run. A client's
 * entry gives up its handle before the call, because RM may reuse the handle at once.
 */
static long free_open(struct qgpu_call *call, struct qgpu_client *client, const struct qgpu_freeing *freeing,
		      bool *gone)
{
	struct qgpu_object *object = qgpu_object_find(client, freeing->handle);
	bool root = freeing->handle == client->handle, held;
	/* freeing an address space or context share also frees the channels (and their TSGs) that use it */
	bool used = object && (object->class == FERMI_VASPACE_A || object->class == FERMI_CONTEXT_SHARE_A);
	long ret;

	ret = qgpu_call_begin(call);
	if (ret)
		return ret;
	held = open_gates(client, freeing->handle);
	if (root)
		WRITE_ONCE(client->dead, true);
	ret = qgpu_call_forward_open(call);
	*gone = is_gone(call, client, freeing);
	if (*gone)
		qgpu_objects_remove(client, freeing->handle);
	else if (root)
		WRITE_ONCE(client->dead, false);
	if (*gone && used)
		qgpu_objects_reconcile(client);
	qgpu_objects_unhold(client);
	qgpu_gate_penalty_end(call->pod, held ? QGPU_GATES_HELD : QGPU_GATES_UNTOUCHED);
	if (*gone && root)
		qgpu_client_unlink(client);
	return ret;
}

static long free_memory(struct qgpu_call *call, struct qgpu_client *client, const struct qgpu_freeing *freeing)
{
	long ret = qgpu_call_forward(call);

	if (is_gone(call, client, freeing))
		qgpu_objects_remove(client, freeing->handle);
	return ret;
}

/* RM frees nothing with it that the object table keeps. */
static long free_untracked(struct qgpu_call *call, struct qgpu_client *client, const struct qgpu_freeing *freeing)
{
	long ret = qgpu_call_forward(call);

	if (is_gone(call, client, freeing))
		qgpu_untracked_forget(client, freeing->handle);
	return ret;
}

/* RM looks through all objects of all clients (gpushareddataDestruct), and gates and neighbours wait. */
static long free_shared_page(struct qgpu_call *call, struct qgpu_client *client, const struct qgpu_freeing *freeing)
{
	long ret = qgpu_call_begin(call);

	if (ret)
		return ret;
	ret = free_untracked(call, client, freeing);
	qgpu_gate_penalty_end(call->pod, QGPU_GATES_OPENED);
	return ret;
}

/*
 * RM would keep it, and the card would write memory that is somebody else's by then. The pod pays for each, as if it had
 * freed it itself, before the next one or the memory goes.
 */
static long free_writer(struct qgpu_call *call, struct qgpu_client *client, u32 parent, u32 handle, size_t status_at)
{
	long ret = qgpu_call_begin(call);
	bool held;

	if (ret)
		return ret;
	held = open_gates(client, handle);
	qgpu_rm_free(client->handle, parent, handle);
	call->owes = qgpu_rm_gone(client->handle, handle);
	if (call->owes)
		qgpu_objects_remove(client, handle);
	qgpu_objects_unhold(client);
	qgpu_gate_penalty_end(call->pod, held ? QGPU_GATES_HELD : QGPU_GATES_UNTOUCHED);
	return call->owes ? 0 : qgpu_call_answer(call, status_at, NV_ERR_STATE_IN_USE);
}

static long free_locked(struct qgpu_call *call, struct qgpu_client *client, const struct qgpu_freeing *freeing)
{
	struct qgpu_object *object = qgpu_object_find(client, freeing->handle);
	struct qgpu_object *writer;
	bool gone = false;
	int tries = 0;
	long ret;

	if (object && qgpu_object_needed(client, object))
		return qgpu_call_answer(call, freeing->status_at, NV_ERR_INVALID_STATE);
	if (!object && freeing->handle != client->handle && is_made_by_rm(call, client, freeing->handle))
		return qgpu_call_answer(call, freeing->status_at, NV_ERR_OBJECT_NOT_FOUND);
	writer = qgpu_written_for(client, freeing->handle);
	if (writer)
		return free_writer(call, client, writer->parent, writer->handle, freeing->status_at);
	if (object && qgpu_is_memory(object->class))
		return free_memory(call, client, freeing);
	if (qgpu_untracked_is_page(client, freeing->handle))
		return free_shared_page(call, client, freeing);
	if (!object && freeing->handle != client->handle)
		return free_untracked(call, client, freeing);
	do {
		ret = free_open(call, client, freeing, &gone);
	} while (!call->owes && !qgpu_call_deliver(call, &ret) && !gone && ++tries < QGPU_CALL_TRIES);
	return ret;
}

static long try_free(struct qgpu_call *call, const struct qgpu_freeing *freeing)
{
	struct qgpu_client *client = qgpu_client_lock(freeing->root, call->pod);
	long ret;

	if (IS_ERR(client))
		return PTR_ERR(client);
	if (!client)
		return qgpu_call_forward(call);
	ret = free_locked(call, client, freeing);
	qgpu_client_unlock(client);
	return ret;
}

long qgpu_free(struct qgpu_call *call, const struct qgpu_freeing *freeing)
{
	long ret;

	do {
		ret = try_free(call, freeing);
	} while (qgpu_call_pay(call, &ret));
	return ret;
}

long qgpu_free_object(struct qgpu_call *call)
{
	return qgpu_free(call, &(struct qgpu_freeing){
		.root = call->in.free.root,
		.handle = call->in.free.object,
		.status_at = offsetof(struct nvos00, status),
	});
}
