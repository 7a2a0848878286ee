// SPDX-License-Identifier: GPL-2.0
/*
 * vram_heap.c - a pod's calls that allocate video memory, in all their forms: checks them against the pod's limit
 * before RM sees them, books what RM says it made, and frees it again if it does not fit. Also VID_HEAP_CONTROL, the
 * older family of calls. mem.c counts how much a pod holds.
 */
#include <linux/sizes.h>
#include <linux/uaccess.h>

#include "client.h"
#include "events.h"
#include "free.h"
#include "mem.h"
#include "rm.h"
#include "toctou.h"
#include "trace.h"
#include "untracked_object.h"
#include "vram_heap.h"

/* Video memory by physical address: for privileged callers, which may be in a pod too. */
bool qgpu_is_physical(u32 class)
{
	return class == NV01_MEMORY_LIST_FBMEM || class == NV01_MEMORY_LIST_OBJECT ||
	       class == NV01_MEMORY_LOCAL_PHYSICAL;
}

bool qgpu_takes_tables(u32 flags)
{
	return flags & NVOS32_ALLOC_FLAGS_SPARSE ||
	       !(flags & (NVOS32_ALLOC_FLAGS_LAZY | NVOS32_ALLOC_FLAGS_EXTERNALLY_MANAGED));
}

bool qgpu_chooses_place(u32 flags, u32 attr2)
{
	return flags & NVOS32_ALLOC_FLAGS_FIXED_ADDRESS_ALLOCATE || attr2 & NVOS32_ATTR2_LOCALIZED_MEMORY;
}

long qgpu_refuse_alloc(struct qgpu_call *call, size_t status_at, u32 status)
{
	atomic64_inc(&call->pod->refused_allocs);
	return qgpu_call_answer(call, status_at, status);
}

long qgpu_refuse_memory(struct qgpu_call *call, int gpu, u64 size, size_t status_at)
{
	trace_qgpu_refuse(call->pod->id, call->nr, NV01_MEMORY_LOCAL_USER, NV_ERR_NO_MEMORY);
	qgpu_event(QGPU_EVENT_MEMORY_REFUSED, call->pod->id, gpu, size);
	return qgpu_refuse_alloc(call, status_at, NV_ERR_NO_MEMORY);
}

void qgpu_take_back(struct qgpu_client *client, u32 parent, u32 handle)
{
	if (qgpu_rm_free(client->handle, parent, handle) == NV_OK)
		qgpu_untracked_forget(client, handle);
}

void qgpu_free_unsaid(const struct qgpu_call *call, u32 status, struct qgpu_client *client, u32 parent, u32 handle)
{
	u32 class;

	if (call->sealed && (status == NV_ERR_INVALID_CLIENT || status == NV_ERR_INSERT_DUPLICATE_NAME))
		return;
	if (qgpu_object_find(client, handle) || qgpu_rm_class(client->handle, handle, &class) != NV_OK)
		return;
	if (qgpu_is_physical(class) || qgpu_is_registered(class) || qgpu_is_memory(class))
		qgpu_take_back(client, parent, handle);
	else
		qgpu_object_note(client, handle, class, -1, false);
}

/* Something else than video memory. What RM does not say the class of counts, too. */
static long keep(struct qgpu_call *call, struct qgpu_client *client, const struct qgpu_vram *vram, u32 handle,
		 u32 class)
{
	bool fits = qgpu_object_fits(client, vram->parent, class, 0);

	qgpu_object_note(client, handle, class, qgpu_object_gpu(client, vram->parent), call->sealed);
	if (fits)
		return 0;
	qgpu_take_back(client, vram->parent, handle);
	return qgpu_call_answer(call, vram->status_at, NV_ERR_INSUFFICIENT_RESOURCES);
}

/*
 * Memory was reserved and RM allocated something: book what RM says it is, and use up the reservation. Only a memory
 * object of the video memory class is charged; a request for "any location" may have become system memory.
 */
static long book(struct qgpu_call *call, struct qgpu_client *client, const struct qgpu_vram *vram, u32 handle,
		 int gpu, struct qgpu_mem *mem)
{
	struct qgpu_object *object;
	u64 size;
	u32 class;
	bool known = qgpu_rm_class(client->handle, handle, &class) == NV_OK;

	if (!known || class != NV01_MEMORY_LOCAL_USER) {
		/* If the answer is not RM's own, the pod pays for whatever RM made until its client goes. */
		if (call->sealed && known)
			qgpu_mem_put(mem);
		else
			qgpu_mem_keep(client, mem);
		if (!qgpu_is_physical(class))
			return keep(call, client, vram, handle, class);
		/* unsealed: another class than the one checked */
		qgpu_rm_free(client->handle, vram->parent, handle);
		return qgpu_refuse_alloc(call, vram->status_at, NV_ERR_INSUFFICIENT_PERMISSIONS);
	}
	if (qgpu_rm_memory_size(client->handle, handle, &size) != NV_OK)
		size = qgpu_mem_size(mem);
	if (qgpu_mem_resize(mem, BIT(gpu), size))
		goto err_free;
	object = qgpu_object_add(client, handle, vram->parent, class, call->sealed);
	if (PTR_ERR_OR_ZERO(object) == -EEXIST) {	/* a forged answer: this handle is booked already */
		qgpu_pod_flag(call->pod, QGPU_POD_TAMPERED, QGPU_EVENT_TAMPERED);
		qgpu_mem_keep(client, mem);
		return 0;
	}
	if (IS_ERR(object))
		goto err_free;
	object->gpu = gpu;
	qgpu_mem_name(object, mem);
	qgpu_object_stamp(object);
	return 0;
err_free:
	qgpu_take_back(client, vram->parent, handle);
	qgpu_mem_put(mem);
	return qgpu_refuse_memory(call, gpu, size, vram->status_at);
}

static u32 word_at(const struct qgpu_call *call, size_t at)
{
	u32 word;

	memcpy(&word, (const char *)&call->out + at, sizeof(word));
	return word;
}

/* No card to charge is known, or needed: video memory is freed again. */
static long uncharged(struct qgpu_call *call, struct qgpu_client *client, const struct qgpu_vram *vram)
{
	u32 handle, status, class;
	long ret;

	ret = qgpu_call_forward(call);
	handle = word_at(call, vram->handle_at);
	status = word_at(call, vram->status_at);
	if (status != NV_OK) {
		qgpu_free_unsaid(call, status, client, vram->parent, handle);
		return ret;
	}
	if (qgpu_rm_class(client->handle, handle, &class) != NV_OK ||
	    (class != NV01_MEMORY_LOCAL_USER && !qgpu_is_physical(class)))
		return keep(call, client, vram, handle, class) ?: ret;
	qgpu_rm_free(client->handle, vram->parent, handle);
	return qgpu_call_answer(call, vram->status_at, NV_ERR_INVALID_STATE) ?: ret;
}

long qgpu_vram_alloc(struct qgpu_call *call, const struct qgpu_vram *vram)
{
	struct qgpu_client *client = qgpu_client_lock_to_take(vram->root, call->pod, 1);
	int gpu = client && !IS_ERR(client) ? qgpu_object_gpu(client, vram->parent) : -1;
	struct qgpu_mem *mem;
	u32 status, handle;
	u64 size;
	long ret;

	if (IS_ERR(client))
		return PTR_ERR(client);
	if (!client)		/* a client older than the module; of another pod: RM refuses it on a control file */
		return qgpu_call_forward(call);
	memcpy(&handle, (const char *)&call->in + vram->handle_at, sizeof(handle));
	if (handle && qgpu_rm_has(client->handle, handle)) {	/* so what is there later is new */
		ret = qgpu_call_answer(call, vram->status_at, NV_ERR_INSERT_DUPLICATE_NAME);
		goto out;
	}
	if (!qgpu_space_may_be(client, vram->parent, vram->space)) {
		ret = qgpu_refuse_alloc(call, vram->status_at, NV_ERR_INVALID_ARGUMENT);
		goto out;
	}
	if (!vram->video) {
		ret = uncharged(call, client, vram);
		goto out;
	}
	if (gpu < 0) {	/* below a device without a card nothing is allocated */
		ret = qgpu_object_device(client, vram->parent) ?
			      qgpu_call_answer(call, vram->status_at, NV_ERR_INVALID_STATE) :
			      uncharged(call, client, vram);
		goto out;
	}
	/* RM rounds up; the final size is charged when it is known */
	size = vram->size > U64_MAX - SZ_64K ? vram->size : round_up(vram->size, (u64)SZ_64K);
	mem = qgpu_mem_new(call->pod, BIT(gpu), size, GFP_KERNEL_ACCOUNT);
	if (IS_ERR(mem)) {
		ret = qgpu_refuse_memory(call, gpu, vram->size, vram->status_at);
		goto out;
	}
	ret = qgpu_call_forward(call);
	status = word_at(call, vram->status_at);
	if (status == NV_OK) {
		ret = book(call, client, vram, word_at(call, vram->handle_at), gpu, mem) ?: ret;
		goto out;
	}
	qgpu_free_unsaid(call, status, client, vram->parent, word_at(call, vram->handle_at));
	if (call->sealed || !qgpu_toctou_sealed() || (ret && ret != -EFAULT))
		qgpu_mem_put(mem);
	else			/* the call missed the probe */
		qgpu_mem_keep(client, mem);
out:
	qgpu_client_unlock(client);
	return ret;
}

/* A member of the union of NVOS32, by its offset in the struct. */
#define HEAP_U32(heap, at) (*(u32 *)((heap)->data + (at) - offsetof(struct nvos32, data)))
#define HEAP_U64(heap, at) (*(u64 *)((heap)->data + (at) - offsetof(struct nvos32, data)))

static bool may_be_vram(u32 flags, u32 attr)
{
	u32 location = NVOS32_ATTR_LOCATION(attr);

	return !(flags & NVOS32_ALLOC_FLAGS_VIRTUAL) &&
	       (location == NVOS32_ATTR_LOCATION_VIDMEM || location == NVOS32_ATTR_LOCATION_ANY);
}

static long heap_alloc(struct qgpu_call *call)
{
	struct nvos32 *heap = &call->in.heap;
	u32 flags = HEAP_U32(heap, NVOS32_FLAGS_AT);
	bool vram = may_be_vram(flags, HEAP_U32(heap, NVOS32_ATTR_AT));

	if ((flags & NVOS32_ALLOC_FLAGS_VIRTUAL ? qgpu_takes_tables(flags) :
						  vram && qgpu_chooses_place(flags, HEAP_U32(heap, NVOS32_ATTR2_AT))) &&
	    qgpu_pod_limited(call->pod))
		return qgpu_refuse_alloc(call, offsetof(struct nvos32, status), NV_ERR_NOT_SUPPORTED);
	return qgpu_vram_alloc(call, &(struct qgpu_vram){
		.video = vram,
		.root = heap->root,
		.parent = heap->parent ?: heap->root,
		.size = HEAP_U64(heap, NVOS32_SIZE_AT),
		.space = flags & NVOS32_ALLOC_FLAGS_VIRTUAL ? heap->vaspace : 0,
		.handle_at = NVOS32_OBJECT_AT,
		.status_at = offsetof(struct nvos32, status),
	});
}

/* For RM this frees any object (_nvos32FunctionFree), even a client. */
static long heap_free(struct qgpu_call *call)
{
	return qgpu_free(call, &(struct qgpu_freeing){
		.root = call->in.heap.root,
		.handle = HEAP_U32(&call->in.heap, NVOS32_OBJECT_AT),
		.status_at = offsetof(struct nvos32, status),
	});
}

/* The size of the card as the pod may see it: its limit, and what is left of it. */
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

/* The other functions that allocate have sizes of their own, and nothing uses them. */
long qgpu_vid_heap(struct qgpu_call *call)
{
	switch (call->in.heap.function) {
	case NVOS32_FUNCTION_ALLOC_SIZE:
		return heap_alloc(call);
	case NVOS32_FUNCTION_FREE:
		return heap_free(call);
	case NVOS32_FUNCTION_INFO:
		return heap_info(call);
	}
	return qgpu_refuse_alloc(call, offsetof(struct nvos32, status), NV_ERR_NOT_SUPPORTED);
}
