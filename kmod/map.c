// SPDX-License-Identifier: GPL-2.0
/*
 * map.c - a pod's mappings for the CPU and, by RM's own calls, for the card. RM's memory for them is charged to nobody.
 * When RM frees an object it undoes all of the object's mappings with its lock held, while other pods' calls and gates
 * wait. So a pod may have only so many. Those for the card may be of anything but the page that RM shares with all.
 *
 * RM maps for the device that a call names, and takes the memory's address for one on that device's card. It compares
 * the two cards nowhere (memMap_IMPL, dmaAllocMapping_GM107).
 *
 * To find a mapping, RM looks through a list of them, in some calls with the card's lock held. So a pod pays for these
 * where the list may be long, also if it names a mapping that is not there.
 */
#include <linux/slab.h>

#include "call.h"
#include "client.h"
#include "dma_mapping.h"
#include "gate_penalty.h"
#include "map.h"
#include "rm.h"
#include "toctou.h"
#include "untracked_object.h"
#include "vram_heap.h"

/* A program has few mappings of an object for the CPU, and hundreds for the card at most. */
#define LONG_LIST 1024

typedef long (*locked_t)(struct qgpu_call *call, struct qgpu_client *client);

/* kind: what the call may make one more of; QGPU_UNTRACKED_KINDS: nothing. */
static long with_client(struct qgpu_call *call, enum qgpu_untracked_kind kind, locked_t make)
{
	u32 handle = call->in.free.root;	/* the first member of every struct */
	struct qgpu_client *client;
	long ret;

	do {
		if (kind == QGPU_UNTRACKED_KINDS)
			client = qgpu_client_lock(handle, call->pod);
		else
			client = qgpu_client_lock_to_make(handle, call->pod, kind);
		if (IS_ERR(client))
			return PTR_ERR(client);
		if (!client)
			return qgpu_call_forward(call);
		ret = make(call, client);
		qgpu_client_unlock(client);
	} while (qgpu_call_pay(call, &ret));
	return ret;
}

static long paid(struct qgpu_call *call, struct qgpu_client *client, u32 list, locked_t make)
{
	long ret;

	if (list <= LONG_LIST)
		return make(call, client);
	ret = qgpu_call_begin(call);
	if (ret)
		return ret;
	ret = make(call, client);
	qgpu_gate_penalty_end(call->pod, QGPU_GATES_OPENED);
	return ret;
}

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
	return with_client(call, QGPU_UNTRACKED_MAPPING, map_locked);
}

static long unmap_locked(struct qgpu_call *call, struct qgpu_client *client)
{
	long ret = qgpu_call_forward(call);

	if (call->sealed && call->out.unmap.status == NV_OK)
		qgpu_mapping_remove(client, call->in.unmap.memory);
	return ret;
}

long qgpu_unmap_memory(struct qgpu_call *call)
{
	return with_client(call, QGPU_UNTRACKED_KINDS, unmap_locked);
}

static long forward(struct qgpu_call *call, struct qgpu_client *client)
{
	return qgpu_call_forward(call);
}

static long update_locked(struct qgpu_call *call, struct qgpu_client *client)
{
	return paid(call, client, qgpu_mappings_of(client, call->in.remap.memory), forward);
}

/*
 * RM looks at no file: any process could have it take another pod's client, and one that has got the number of the
 * process that made a mapping could change it (RmUpdateDeviceMappingInfo).
 */
long qgpu_update_mapping(struct qgpu_call *call)
{
	u64 pod = qgpu_client_pod(call->in.remap.client);

	if (pod && pod != call->pod->id && !READ_ONCE(call->pod->gone))
		return qgpu_refuse_alloc(call, offsetof(struct nvos56, status), NV_ERR_INVALID_CLIENT);
	return with_client(call, QGPU_UNTRACKED_KINDS, update_locked);
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
	return with_client(call, QGPU_UNTRACKED_DMA_MAPPING, map_dma_locked);
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

static long unmap_from_card(struct qgpu_call *call, struct qgpu_client *client)
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

/* From 550 on RM holds the card's lock meanwhile (serverInterUnmapInternal). */
static long unmap_dma_locked(struct qgpu_call *call, struct qgpu_client *client)
{
	return paid(call, client, client->nr_untracked[QGPU_UNTRACKED_DMA_MAPPING], unmap_from_card);
}

long qgpu_unmap_dma(struct qgpu_call *call)
{
	return with_client(call, QGPU_UNTRACKED_DMA_MAPPING, unmap_dma_locked);
}
