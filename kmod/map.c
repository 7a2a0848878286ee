// SPDX-License-Identifier: GPL-2.0
/*
 * map.c - a pod's mappings for the CPU and, by RM's own calls, for the card. RM's memory for them is charged to nobody.
 * When RM frees an object it undoes all of the object's mappings with its lock held, while other pods' calls and gates
 * wait. So a pod may have only so many. Those for the card may be of anything but the page that RM shares with all.
 *
 * RM maps for the device that a call names, and takes the memory's address for one on that device's card. It compares
 * the two cards nowhere (memMap_IMPL, dmaAllocMapping_GM107).
 */
#include <linux/slab.h>

#include "call.h"
#include "client.h"
#include "dma_mapping.h"
#include "map.h"
#include "rm.h"
#include "toctou.h"
#include "untracked_object.h"
#include "vram_heap.h"

static long refuse(struct qgpu_call *call, size_t status_at, u32 status)
{
	atomic64_inc(&call->pod->refused_objects);
	return qgpu_call_answer(call, status_at, status);
}

/* Of host memory, which the object table does not keep, RM maps the pages, whatever the card (osMapSystemMemory). */
static bool is_video_memory_of_other_card(struct qgpu_client *client, u32 device, u32 memory)
{
	const struct qgpu_object *object = qgpu_object_find(client, memory);

	if (!object || !qgpu_is_memory(object->class))
		return false;
	return object->gpu < 0 || object->gpu != qgpu_object_gpu(client, device);
}

/* Counted first, and for good without RM's own answer: RM may have mapped it. */
static long map_locked(struct qgpu_call *call, struct qgpu_client *client)
{
	size_t status_at = offsetof(struct nvos33_fd, status);
	u32 memory = call->in.map.memory;
	long ret;

	if (is_video_memory_of_other_card(client, call->in.map.device, memory))
		return qgpu_refuse_alloc(call, status_at, NV_ERR_INVALID_ARGUMENT);
	if (!qgpu_mapping_fits(client) && !READ_ONCE(call->pod->gone))
		return refuse(call, status_at, NV_ERR_INSUFFICIENT_RESOURCES);
	if (qgpu_mapping_add(client, memory))
		return refuse(call, status_at, NV_ERR_NO_MEMORY);
	ret = qgpu_call_forward(call);
	if (call->sealed && call->out.map.status != NV_OK)
		qgpu_mapping_remove(client, memory);
	return ret;
}

long qgpu_map_memory(struct qgpu_call *call)
{
	struct qgpu_client *client = qgpu_client_lock_to_make(call->in.map.client, call->pod, QGPU_UNTRACKED_MAPPING);
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

/* An address on the fabric is of no card. Of host memory RM takes the address that the card has (memdescCreateSubMem). */
static bool is_of_any_card(struct qgpu_client *client, u32 memory)
{
	u32 class;

	return qgpu_rm_class(client->handle, memory, &class) == NV_OK &&
	       (class == NV_MEMORY_FABRIC || class == NV_MEMORY_MULTICAST_FABRIC || class == NV01_MEMORY_SYSTEM ||
		class == NV01_MEMORY_SYSTEM_OS_DESCRIPTOR);
}

/* A peer's memory RM takes for that of the card that its handle lies below. */
static bool crosses_cards(struct qgpu_client *client, const struct nvos46 *in)
{
	int gpu = qgpu_object_gpu(client, in->device);

	if (gpu < 0 || qgpu_memory_gpu(client, in->dma) != gpu)
		return true;
	if (NVOS46_FLAGS_P2P_ENABLE(in->flags) == NVOS46_FLAGS_P2P_ENABLE_NOSLI)
		gpu = qgpu_object_gpu(client, in->memory);
	if (gpu >= 0 && qgpu_memory_gpu(client, in->memory) == gpu)
		return false;
	return !is_of_any_card(client, in->memory);
}

/* Before it is mapped RM has not chosen the place. */
static struct qgpu_dma_mapping *mapping_for(const struct qgpu_call *call)
{
	const struct nvos46 *in = &call->in.map_dma;
	struct qgpu_dma_mapping *mapping = kzalloc(sizeof(*mapping), GFP_KERNEL_ACCOUNT);

	if (mapping)
		mapping->at = (struct qgpu_dma_range){ in->device, in->dma, in->memory, 0, in->length };
	return mapping;
}

static long map_dma_locked(struct qgpu_call *call, struct qgpu_client *client)
{
	size_t status_at = call->size - NVOS46_STATUS_BEFORE_END;
	struct qgpu_dma_mapping *mapping;
	u32 status;
	long ret;

	/* without a seal another thread could name the page after the check */
	if (!qgpu_toctou_sealed() || qgpu_rm_is_shared_page(client->handle, call->in.map_dma.memory))
		return qgpu_refuse_alloc(call, status_at, NV_ERR_NOT_SUPPORTED);
	if (crosses_cards(client, &call->in.map_dma))
		return qgpu_refuse_alloc(call, status_at, NV_ERR_INVALID_ARGUMENT);
	if (!qgpu_dma_mapping_fits(client) && !READ_ONCE(call->pod->gone))
		return refuse(call, status_at, NV_ERR_INSUFFICIENT_RESOURCES);
	mapping = mapping_for(call);
	if (!mapping)
		return refuse(call, status_at, NV_ERR_NO_MEMORY);
	ret = qgpu_call_forward(call);
	memcpy(&status, (const char *)&call->out + status_at, sizeof(status));
	memcpy(&mapping->at.start, (const char *)&call->out + call->size - NVOS46_DMA_OFFSET_BEFORE_END,
	       sizeof(mapping->at.start));
	if (call->sealed && status != NV_OK)
		kfree(mapping);
	else
		qgpu_dma_mapping_add(client, mapping, call->sealed);
	return ret;
}

long qgpu_map_dma(struct qgpu_call *call)
{
	struct qgpu_client *client =
		qgpu_client_lock_to_make(call->in.map_dma.client, call->pod, QGPU_UNTRACKED_DMA_MAPPING);
	long ret;

	if (IS_ERR(client))
		return PTR_ERR(client);
	if (!client)
		return qgpu_call_forward(call);
	ret = map_dma_locked(call, client);
	qgpu_client_unlock(client);
	return ret;
}

/*
 * RM undoes what lies in a range, and may leave two parts of one mapping. Without its own answer one more is counted.
 * room: an entry for that.
 */
static long unmap_range(struct qgpu_call *call, struct qgpu_client *client, const struct qgpu_dma_range *range)
{
	size_t status_at = call->size - NVOS47_STATUS_BEFORE_END;
	struct qgpu_dma_mapping *room;
	long ret;

	if ((!qgpu_toctou_sealed() || qgpu_dma_mapping_splits(client, range)) && !qgpu_dma_mapping_fits(client) &&
	    !READ_ONCE(call->pod->gone))
		return refuse(call, status_at, NV_ERR_INSUFFICIENT_RESOURCES);
	room = kzalloc(sizeof(*room), GFP_KERNEL_ACCOUNT);
	if (!room)
		return refuse(call, status_at, NV_ERR_NO_MEMORY);
	room->at = *range;
	ret = qgpu_call_forward(call);
	if (!call->sealed) {
		qgpu_dma_mapping_add(client, room, false);
		return ret;
	}
	if (call->out.unmap_dma.status == NV_OK && range->length)
		room = qgpu_dma_mappings_cut(client, range, room);
	else if (call->out.unmap_dma.status == NV_OK)
		qgpu_dma_mapping_remove(client, range);
	kfree(room);
	return ret;
}

static long unmap_dma_locked(struct qgpu_call *call, struct qgpu_client *client)
{
	size_t status_at = call->size - NVOS47_STATUS_BEFORE_END;
	const struct nvos47 *in = &call->in.unmap_dma;
	struct qgpu_dma_range range = { in->device, in->dma, in->memory, in->dma_offset };
	u32 status;
	long ret;

	if (call->size != NVOS47_BYTES_BEFORE_550) {
		range.length = in->size;
		return unmap_range(call, client, &range);
	}
	ret = qgpu_call_forward(call);
	memcpy(&status, (const char *)&call->out + status_at, sizeof(status));
	if (call->sealed && status == NV_OK)
		qgpu_dma_mapping_remove(client, &range);
	return ret;
}

long qgpu_unmap_dma(struct qgpu_call *call)
{
	struct qgpu_client *client =
		qgpu_client_lock_to_make(call->in.unmap_dma.client, call->pod, QGPU_UNTRACKED_DMA_MAPPING);
	long ret;

	if (IS_ERR(client))
		return PTR_ERR(client);
	if (!client)
		return qgpu_call_forward(call);
	ret = unmap_dma_locked(call, client);
	qgpu_client_unlock(client);
	return ret;
}
