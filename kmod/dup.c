// SPDX-License-Identifier: GPL-2.0
/*
 * dup.c - duplicates that a pod makes of its own objects or of others'. Its own memory stays charged once as long as it
 * is known which memory it is; else, and if it is another pod's, it is charged like memory of its own. What carries a gate, or takes
 * channels along when it goes, has one name only.
 */
#include "client.h"
#include "escape.h"
#include "mem.h"
#include "rm.h"

static int charge_as_own(struct qgpu_pod *pod, struct qgpu_object *object, u64 size)
{
	if (object->gpu < 0 || qgpu_mem_reserve(pod, object->gpu, size))
		return -EDQUOT;
	if (!qgpu_mem_attach(object, size))
		return 0;
	qgpu_mem_unreserve(pod, object->gpu, size);
	return -ENOMEM;
}

/*
 * The source is another client's, whose lock is not held: it can have been freed, and its handle given to other memory,
 * before RM came to look for it. It is what we think it is if it was that before and after, and RM says the same size.
 */
static int charge(struct qgpu_call *call, struct qgpu_object *object, struct qgpu_mem *before, u64 size)
{
	struct qgpu_mem *after = qgpu_client_mem(call->in.dup.client_src, call->in.dup.object_src);

	if (after && after == before && qgpu_mem_size(after) == size && qgpu_mem_pod(after) == call->pod) {
		qgpu_mem_alias(object, after);
		return 0;
	}
	qgpu_mem_put(after);
	return charge_as_own(call->pod, object, size);
}

/* What was duplicated, by RM's word. A status other than NV_OK: it cannot stay. */
static u32 register_dup(struct qgpu_call *call, struct qgpu_client *client, u32 parent, struct qgpu_mem *before)
{
	u32 handle = call->out.dup.object, class;
	struct qgpu_object *object;
	u64 size;

	if (qgpu_rm_class(client->handle, handle, &class) != NV_OK)
		return call->sealed ? NV_ERR_NO_MEMORY : NV_OK;
	if (qgpu_is_physical(class))
		return NV_ERR_INSUFFICIENT_PERMISSIONS;
	if (qgpu_is_registered(class))	/* what then hangs below a duplicated TSG would have no gate */
		return NV_ERR_NOT_SUPPORTED;
	if (class != NV01_MEMORY_LOCAL_USER)
		return NV_OK;
	object = qgpu_object_add(client, handle, parent, class, call->sealed);
	if (IS_ERR(object))
		return NV_ERR_NO_MEMORY;
	if (qgpu_rm_memory_size(client->handle, handle, &size) == NV_OK && !charge(call, object, before, size))
		return NV_OK;
	qgpu_objects_remove(client, handle);
	return NV_ERR_NO_MEMORY;
}

long qgpu_dup(struct qgpu_call *call)
{
	struct qgpu_client *client = qgpu_client_lock(call->in.dup.client, call->pod);
	u32 parent = call->in.dup.parent ?: call->in.dup.client, status;
	struct qgpu_mem *before;
	long ret;

	if (IS_ERR(client))
		return PTR_ERR(client);
	if (!client)
		return qgpu_call_forward(call);
	before = qgpu_client_mem(call->in.dup.client_src, call->in.dup.object_src);
	ret = qgpu_call_forward(call);
	if (call->out.dup.status == NV_OK) {
		status = register_dup(call, client, parent, before);
		if (status != NV_OK) {
			qgpu_rm_free(client->handle, parent, call->out.dup.object);
			ret = qgpu_call_answer(call, offsetof(struct nvos55, status), status) ?: ret;
		}
	}
	qgpu_client_unlock(client);
	qgpu_mem_put(before);
	return ret;
}
