// SPDX-License-Identifier: GPL-2.0
/*
 * video.c - a pod's calls that allocate video memory, whatever their form: admitted against the pod's limit before RM
 * sees them, booked by what RM says of the object it made, freed again if that does not fit. And VID_HEAP_CONTROL, the
 * older family of calls. How much a pod holds is mem.c's.
 */
#include <linux/uaccess.h>

#include "client.h"
#include "escape.h"
#include "events.h"
#include "mem.h"
#include "rm.h"
#include "seal.h"
#include "trace.h"

/* Video memory by its address: for the privileged, who may be in a pod all the same. */
bool qgpu_is_physical(u32 class)
{
	return class == NV01_MEMORY_LIST_FBMEM || class == NV01_MEMORY_LIST_OBJECT ||
	       class == NV01_MEMORY_LOCAL_PHYSICAL;
}

long qgpu_refuse_class(struct qgpu_call *call, size_t status_at)
{
	atomic64_inc(&call->pod->refused_allocs);
	return qgpu_call_answer(call, status_at, NV_ERR_INSUFFICIENT_PERMISSIONS);
}

static long refuse_memory(struct qgpu_call *call, int gpu, u64 size, size_t status_at)
{
	atomic64_inc(&call->pod->refused_allocs);
	trace_qgpu_refuse(call->pod->id, call->nr, NV01_MEMORY_LOCAL_USER, NV_ERR_NO_MEMORY);
	qgpu_event(QGPU_EVENT_MEMORY_REFUSED, call->pod->id, gpu, size);
	return qgpu_call_answer(call, status_at, NV_ERR_NO_MEMORY);
}

/* The answer is not RM's own, and names no new memory: whatever RM made, the pod pays for it until its client goes. */
static void keep(struct qgpu_client *client, int gpu, u64 reserved)
{
	struct qgpu_mem *mem = qgpu_mem_new(client->pod, gpu, reserved);

	if (mem && qgpu_client_keep(client, mem))
		qgpu_mem_put(mem);
}

/*
 * Memory was reserved and RM allocated something: book it by what RM says of it. Only a memory object of the video
 * memory class is charged; "any location" may have become system memory.
 */
static long book(struct qgpu_call *call, struct qgpu_client *client, const struct qgpu_video *video, u32 handle,
		 int gpu)
{
	u64 reserved = video->size, size = reserved;
	struct qgpu_object *object;
	u32 class;
	bool known = qgpu_rm_class(client->handle, handle, &class) == NV_OK;

	if (!known || class != NV01_MEMORY_LOCAL_USER) {
		if (call->sealed && known)
			qgpu_mem_unreserve(call->pod, gpu, reserved);
		else
			keep(client, gpu, reserved);
		if (!qgpu_is_physical(class))
			return 0;
		/* _rmAllocMemoryLocalUser, for an administrator */
		qgpu_rm_free(client->handle, video->parent, handle);
		return qgpu_refuse_class(call, video->status_at);
	}
	if (qgpu_rm_memory_size(client->handle, handle, &size) != NV_OK)
		size = reserved;
	if (qgpu_mem_resize(call->pod, gpu, reserved, size))
		goto err_free;
	reserved = size;
	object = qgpu_object_add(client, handle, video->parent, class, call->sealed);
	if (PTR_ERR_OR_ZERO(object) == -EEXIST) {	/* a forged answer: it is booked already */
		qgpu_pod_flag(call->pod, QGPU_POD_TAMPERED, QGPU_EVENT_TAMPERED);
		keep(client, gpu, reserved);
		return 0;
	}
	if (IS_ERR(object))
		goto err_free;
	object->gpu = gpu;
	if (!qgpu_mem_attach(object, size))
		return 0;
	qgpu_objects_remove(client, handle);
err_free:
	qgpu_rm_free(client->handle, video->parent, handle);
	qgpu_mem_unreserve(call->pod, gpu, reserved);
	return refuse_memory(call, gpu, size, video->status_at);
}

static u32 word_at(const struct qgpu_call *call, size_t at)
{
	u32 word;

	memcpy(&word, (const char *)&call->out + at, sizeof(word));
	return word;
}

/* No card is known to charge: below a device that has none yet nothing is asked for, and nothing stays elsewhere. */
static long without_card(struct qgpu_call *call, struct qgpu_client *client, const struct qgpu_video *video)
{
	u32 handle, class;
	long ret;

	if (qgpu_object_device(client, video->parent))
		return qgpu_call_answer(call, video->status_at, NV_ERR_INVALID_STATE);
	ret = qgpu_call_forward(call);
	handle = word_at(call, video->handle_at);
	if (word_at(call, video->status_at) != NV_OK) {
		qgpu_free_unsaid(client, video->parent, handle);
		return ret;
	}
	if (qgpu_rm_class(client->handle, handle, &class) != NV_OK ||
	    (class != NV01_MEMORY_LOCAL_USER && !qgpu_is_physical(class)))
		return ret;
	qgpu_rm_free(client->handle, video->parent, handle);
	return qgpu_call_answer(call, video->status_at, NV_ERR_INVALID_STATE) ?: ret;
}

long qgpu_video_alloc(struct qgpu_call *call, const struct qgpu_video *video)
{
	struct qgpu_client *client = qgpu_client_lock(video->root, call->pod);
	int gpu = client && !IS_ERR(client) ? qgpu_object_gpu(client, video->parent) : -1;
	long ret;

	if (IS_ERR(client))
		return PTR_ERR(client);
	if (!client)		/* of a client from before we came, or none of the pod's: RM refuses the latter */
		return qgpu_call_forward(call);
	if (gpu < 0) {
		ret = without_card(call, client, video);
		goto out;
	}
	if (qgpu_mem_reserve(call->pod, gpu, video->size)) {
		ret = refuse_memory(call, gpu, video->size, video->status_at);
		goto out;
	}
	ret = qgpu_call_forward(call);
	if (word_at(call, video->status_at) == NV_OK) {
		ret = book(call, client, video, word_at(call, video->handle_at), gpu) ?: ret;
		goto out;
	}
	qgpu_free_unsaid(client, video->parent, word_at(call, video->handle_at));
	if (call->sealed || !qgpu_sealed() || (ret && ret != -EFAULT))
		qgpu_mem_unreserve(call->pod, gpu, video->size);
	else			/* it did not pass the probe */
		keep(client, gpu, video->size);
out:
	qgpu_client_unlock(client);
	return ret;
}

/* Offsets in the union of NVOS32, by function: nvos.h. */
#define HEAP_U32(heap, at) (*(u32 *)((heap)->data + (at) - offsetof(struct nvos32, data)))
#define HEAP_U64(heap, at) (*(u64 *)((heap)->data + (at) - offsetof(struct nvos32, data)))

static bool may_be_video(u32 flags, u32 attr)
{
	u32 location = NVOS32_ATTR_LOCATION(attr);

	return !(flags & NVOS32_ALLOC_FLAGS_VIRTUAL) &&
	       (location == NVOS32_ATTR_LOCATION_VIDMEM || location == NVOS32_ATTR_LOCATION_ANY);
}

static long heap_alloc(struct qgpu_call *call, u32 attr_at, u32 size_at)
{
	struct nvos32 *heap = &call->in.heap;

	if (!may_be_video(HEAP_U32(heap, 52), HEAP_U32(heap, attr_at)))
		return qgpu_call_forward(call);
	return qgpu_video_alloc(call, &(struct qgpu_video){
		.root = heap->root,
		.parent = heap->parent ?: heap->root,
		.size = HEAP_U64(heap, size_at),
		.handle_at = 44,
		.status_at = offsetof(struct nvos32, status),
	});
}

/* For RM this frees any object (_nvos32FunctionFree), a client too. */
static long heap_free(struct qgpu_call *call)
{
	return qgpu_free(call, &(struct qgpu_freeing){
		.root = call->in.heap.root,
		.handle = HEAP_U32(&call->in.heap, 44),
		.status_at = offsetof(struct nvos32, status),
	});
}

/* The card's size as the pod may see it: its limit, and what is left of it. */
static long heap_info(struct qgpu_call *call)
{
	struct qgpu_client *client = qgpu_client_lock(call->in.heap.root, call->pod);
	u64 used, peak, limit, total, left;
	long ret;
	int gpu;

	if (IS_ERR(client))
		return PTR_ERR(client);
	gpu = client ? qgpu_object_gpu(client, call->in.heap.parent) : -1;
	if (client)
		qgpu_client_unlock(client);
	ret = qgpu_call_forward(call);
	if (ret || gpu < 0 || call->out.heap.status != NV_OK)
		return ret;
	qgpu_mem_usage(call->pod, gpu, &used, &peak);
	limit = READ_ONCE(call->pod->shares[gpu].memory_limit);
	total = min(call->out.heap.total, limit);
	left = min(call->out.heap.free, limit > used ? limit - used : 0);
	if (put_user(total, (u64 __user *)(call->user + offsetof(struct nvos32, total))) ||
	    put_user(left, (u64 __user *)(call->user + offsetof(struct nvos32, free))))
		return -EFAULT;
	return ret;
}

long qgpu_vid_heap(struct qgpu_call *call)
{
	switch (call->in.heap.function) {
	case NVOS32_FUNCTION_ALLOC_SIZE:
		return heap_alloc(call, 56, 88);
	case NVOS32_FUNCTION_ALLOC_TILED:
		return heap_alloc(call, 64, 88);
	case NVOS32_FUNCTION_ALLOC_SIZE_RANGE:
		return heap_alloc(call, 56, 80);
	case NVOS32_FUNCTION_FREE:
		return heap_free(call);
	case NVOS32_FUNCTION_INFO:
		return heap_info(call);
	}
	return qgpu_call_forward(call);
}
