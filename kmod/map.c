// SPDX-License-Identifier: GPL-2.0
/*
 * map.c - a pod's mappings for the CPU. RM's memory for them is charged to nobody. When RM frees an object it undoes
 * all of the object's mappings with its lock held, while other pods' calls and gates wait. So a pod may have only so
 * many. Mappings for the card may be of anything but the page that RM shares with all.
 */
#include "call.h"
#include "client.h"
#include "map.h"
#include "rm.h"
#include "toctou.h"
#include "untracked_object.h"
#include "vram_heap.h"

static long refuse(struct qgpu_call *call, u32 status)
{
	atomic64_inc(&call->pod->refused_objects);
	return qgpu_call_answer(call, offsetof(struct nvos33_fd, status), status);
}

/* Counted first, and for good without RM's own answer: RM may have mapped it. */
static long map_locked(struct qgpu_call *call, struct qgpu_client *client)
{
	u32 memory = call->in.map.memory;
	long ret;

	if (!qgpu_mapping_fits(client) && !READ_ONCE(call->pod->gone))
		return refuse(call, NV_ERR_INSUFFICIENT_RESOURCES);
	if (qgpu_mapping_add(client, memory))
		return refuse(call, NV_ERR_NO_MEMORY);
	ret = qgpu_call_forward(call);
	if (call->sealed && call->out.map.status != NV_OK)
		qgpu_mapping_remove(client, memory);
	return ret;
}

long qgpu_map_memory(struct qgpu_call *call)
{
	struct qgpu_client *client = qgpu_client_lock_to_map(call->in.map.client, call->pod);
	long ret;

	if (IS_ERR(client))
		return PTR_ERR(client);
	if (!client)
		return qgpu_call_forward(call);
	ret = map_locked(call, client);
	qgpu_client_unlock(client);
	return ret;
}

long qgpu_unmap_memory(struct qgpu_call *call)
{
	struct qgpu_client *client = qgpu_client_lock(call->in.unmap.client, call->pod);
	long ret;

	if (IS_ERR(client))
		return PTR_ERR(client);
	ret = qgpu_call_forward(call);
	if (!client)
		return ret;
	if (call->sealed && call->out.unmap.status == NV_OK)
		qgpu_mapping_remove(client, call->in.unmap.memory);
	qgpu_client_unlock(client);
	return ret;
}

/* Without a seal another thread could name the page after the check. */
long qgpu_map_dma(struct qgpu_call *call)
{
	struct qgpu_client *client = qgpu_client_lock(call->in.map_dma.client, call->pod);
	long ret;

	if (IS_ERR(client))
		return PTR_ERR(client);
	if (client && (!qgpu_toctou_sealed() || qgpu_rm_is_shared_page(client->handle, call->in.map_dma.memory)))
		ret = qgpu_refuse_alloc(call, call->size - 2 * sizeof(u32), NV_ERR_NOT_SUPPORTED);
	else
		ret = qgpu_call_forward(call);
	if (client)
		qgpu_client_unlock(client);
	return ret;
}
