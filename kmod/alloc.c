// SPDX-License-Identifier: GPL-2.0
/*
 * alloc.c - a pod's allocations of clients and objects: enters them in the object table. vram_heap.c handles video
 * memory, context.c decides what a TSG or channel means.
 *
 * Only a sealed call guarantees that RM acts on the parameters that were checked here. So the module still asks RM what
 * it made, as far as RM can tell.
 */
#include <linux/uaccess.h>

#include "alloc.h"
#include "client.h"
#include "context.h"
#include "events.h"
#include "gate_penalty.h"
#include "gpu.h"
#include "mem.h"
#include "object_part.h"
#include "rm.h"
#include "rule_lookup.h"
#include "toctou.h"
#include "trace.h"
#include "untracked_object.h"
#include "vram_heap.h"

/* What all forms of the call have in common. */
struct request {
	u32 root, parent, object, class;
	u64 params;
	size_t status_at;
	u8 flags, memory_at;	/* of the class, see rule_lookup.h */
	u32 written[QGPU_WRITTEN_MAX];	/* handles of memory that the card or RM writes for the object */
	u32 number;		/* of a device: RM's, of its card */
};

static struct request request_of(const struct qgpu_call *call)
{
	const struct nvos21 *alloc = &call->in.alloc;
	struct request request = { alloc->root, alloc->parent, alloc->object, alloc->class };

	if (call->nr == NV_ESC_RM_ALLOC_MEMORY) {
		request.status_at = offsetof(struct nvos02_fd, status);
	} else if (call->nr == NV_ESC_RM_ALLOC_OBJECT) {
		request.status_at = offsetof(struct nvos05, status);
	} else if (call->size == sizeof(struct nvos21)) {
		request.params = alloc->params;
		request.status_at = offsetof(struct nvos21, status);
	} else {
		request.params = alloc->params;
		request.status_at = offsetof(struct nvos64, status);
	}
	if (!request.parent)	/* as RM reads it: alloc_free.c */
		request.parent = request.root;
	return request;
}

static u32 answered(const struct qgpu_call *call, const struct request *request)
{
	u32 status;

	memcpy(&status, (const char *)&call->out + request->status_at, sizeof(status));
	return status;
}

/*
 * RM gives the handle back but for RM_ALLOC_MEMORY, where it acts on what the call names
 * (rmapi_deprecated_allocmemory.c).
 */
static u32 handle_of(const struct qgpu_call *call, const struct request *request)
{
	return call->nr == NV_ESC_RM_ALLOC_MEMORY ? request->object : call->out.alloc.object;
}

/* The copied parameters begin with room for every member known here; without a copy they read as 0. */
static u32 param_u32(const struct qgpu_call *call, size_t at)
{
	u32 value = 0;

	if (call->params_size)
		memcpy(&value, call->room + at, sizeof(value));
	return value;
}

/*
 * RM can report a failure although it made the object: if it cannot write the parameters back, it returns an error and
 * keeps the object (alloc_free.c:serverAllocApiCopyOut). So this failure is checked with RM too. After any other, a
 * client with this handle is somebody else's.
 */
static bool may_be_made(const struct qgpu_call *call, u32 status)
{
	return !call->sealed || status == NV_OK || status == NV_ERR_INVALID_ADDRESS;
}

static long make_client(struct qgpu_call *call, const struct request *request, struct qgpu_client *client)
{
	u32 handle, status, class;
	bool said, sure;
	long ret;
	int error;

	ret = qgpu_call_forward(call);
	handle = call->out.alloc.object;
	status = answered(call, request);
	said = status == NV_OK;
	sure = said && call->sealed;
	if (!may_be_made(call, status) || (!sure && qgpu_rm_class(handle, handle, &class) != NV_OK)) {
		qgpu_client_put(client);
		return ret;
	}
	error = qgpu_client_add(client, &call->file->clients, handle, sure);
	if (error && sure) {
		qgpu_rm_free(handle, handle, handle);
		return qgpu_call_answer(call, request->status_at, NV_ERR_NO_MEMORY);
	}
	if (error && said)	/* the handle is forged, and not ours to free */
		qgpu_pod_flag(call->pod, QGPU_POD_TAMPERED, QGPU_EVENT_TAMPERED);
	return ret;
}

/*
 * A caller may choose the handle of a client as the root. RM does not read the object, and writes the client's handle
 * there if it makes one (rs_server.c:serverAllocClient). So what stands there after a failure is not the caller's word.
 */
static int clear_object(struct qgpu_call *call)
{
	call->in.alloc.object = 0;
	return put_user(0, (u32 __user *)(call->user + offsetof(struct nvos21, object)));
}

static long alloc_client(struct qgpu_call *call, const struct request *request)
{
	struct qgpu_client *client;
	long ret;

	if (request->object && clear_object(call))
		return -EFAULT;
	client = qgpu_client_new(call->pod);
	if (IS_ERR(client))
		return PTR_ERR(client);
	if (!client)	/* a client outside the object table would have no limit, so RM makes none */
		return qgpu_call_answer(call, request->status_at, NV_ERR_NO_MEMORY);
	ret = make_client(call, request, client);
	qgpu_client_made(call->pod);
	return ret;
}

/*
 * RM tells which card a device is on, by the device's first subdevice: the pod can change the number in the call's
 * parameters after RM has read it. Until then the device has no card, and nothing that needs one is made below it.
 */
static void learn_gpu(struct qgpu_client *client, struct qgpu_object *subdevice)
{
	struct qgpu_object *device = qgpu_object_find(client, subdevice->parent);
	u32 gpu_id;

	if (!device || device->class != NV01_DEVICE_0 ||
	    qgpu_rm_gpu_id(client->handle, subdevice->handle, &gpu_id) != NV_OK)
		return;
	device->gpu = qgpu_gpu_find(gpu_id);
	if (device->gpu < 0) {	/* it has come since */
		qgpu_gpus_enumerate();
		device->gpu = qgpu_gpu_find(gpu_id);
	}
	subdevice->gpu = device->gpu;
	qgpu_device_learned(device);
}

static void learn_memory(struct qgpu_client *client, struct qgpu_object *subdevice)
{
	u64 bytes;

	if (subdevice->gpu < 0 || READ_ONCE(qgpu_gpus[subdevice->gpu].memory))
		return;
	if (qgpu_rm_fb_total(client->handle, subdevice->handle, &bytes) == NV_OK)
		WRITE_ONCE(qgpu_gpus[subdevice->gpu].memory, bytes);
}

static void look_at_written(const struct qgpu_call *call, struct request *request)
{
	static const u8 of_tsg[QGPU_WRITTEN_MAX] = NV_TSG_PARAMS_WRITTEN_AT;
	static const u8 of_channel[QGPU_WRITTEN_MAX] = NV_CHANNEL_PARAMS_WRITTEN_AT;
	static const u8 of_surface[QGPU_WRITTEN_MAX] = NV_SURFACE_PARAMS_MEMORY_AT;
	const u8 *at;
	int i;

	if (request->class == NV_SEMAPHORE_SURFACE)
		at = of_surface;
	else if (NV_IS_GPFIFO(request->class))
		at = of_channel;
	else if (request->class == KEPLER_CHANNEL_GROUP_A)
		at = of_tsg;
	else
		return;
	for (i = 0; i < QGPU_WRITTEN_MAX; i++)
		request->written[i] = param_u32(call, at[i]);
}

static u32 space_of(const struct qgpu_call *call, u32 class)
{
	switch (class) {
	case KEPLER_CHANNEL_GROUP_A:
		return param_u32(call, NV_TSG_PARAMS_SPACE_AT);
	case FERMI_CONTEXT_SHARE_A:
		return param_u32(call, NV_CONTEXT_SHARE_PARAMS_SPACE_AT);
	case NV50_MEMORY_VIRTUAL:
		return param_u32(call, NV_MEMORY_PARAMS_SPACE_AT);
	case NV01_MEMORY_VIRTUAL:
		return param_u32(call, NV_VIRTUAL_PARAMS_SPACE_AT);
	}
	return NV_IS_GPFIFO(class) ? param_u32(call, NV_CHANNEL_PARAMS_SPACE_AT) : 0;
}

static u32 engine_of(const struct qgpu_call *call, u32 class)
{
	return param_u32(call, class == KEPLER_CHANNEL_GROUP_A ? NV_TSG_PARAMS_ENGINE_AT : NV_CHANNEL_PARAMS_ENGINE_AT);
}

static u32 copied_by(const struct qgpu_call *call)
{
	u32 engine = param_u32(call, NV_COPIES_PARAMS_ENGINE_AT);

	return param_u32(call, NV_COPIES_PARAMS_BY_TYPE_AT) ? engine : NV2080_ENGINE_TYPE_COPY(engine);
}

/* mem: the memory charged for the object, or NULL; consumes the reference. */
static int register_object(struct qgpu_call *call, struct qgpu_client *client, const struct request *request,
			   u32 handle, u32 class, struct qgpu_mem *mem)
{
	struct qgpu_object *object = qgpu_object_add(client, handle, request->parent, class, call->sealed);
	int ret;

	if (IS_ERR(object)) {
		qgpu_mem_put(mem);
		return PTR_ERR(object) == -EEXIST ? 0 : PTR_ERR(object);
	}
	qgpu_mem_name(object, mem);
	object->number = request->number;
	qgpu_written_note(client, object, request->written);
	if (class == NV_MEMORY_FABRIC) {
		qgpu_object_stamp(object);
		return 0;
	}
	if (class == NV20_SUBDEVICE_0) {
		learn_gpu(client, object);
		learn_memory(client, object);
	}
	ret = qgpu_enter_tsg(client, object, engine_of(call, class), call->sealed);
	if (ret)
		qgpu_objects_remove(client, handle);
	return ret;
}

/* RM's class counts, not the call's: without a seal the two can differ. */
static int book(struct qgpu_call *call, struct qgpu_client *client, const struct request *request, u32 handle,
		struct qgpu_mem *mem)
{
	u32 class;

	if (qgpu_rm_class(client->handle, handle, &class) != NV_OK) {
		qgpu_mem_put(mem);
		return call->sealed ? -EIO : 0;
	}
	if (qgpu_is_registered(class) || class == NV_MEMORY_FABRIC)
		return register_object(call, client, request, handle, class, mem);
	qgpu_mem_put(mem);
	qgpu_object_note(client, handle, class, qgpu_object_gpu(client, request->parent), call->sealed);
	return class == NV01_MEMORY_LOCAL_USER ? -EINVAL : 0;
}

/* The memory that the object is a further handle of, or a charge for what RM takes for it; NULL: neither. */
static struct qgpu_mem *mem_for(struct qgpu_call *call, struct qgpu_client *client, const struct request *request)
{
	struct qgpu_object *memory;

	if (!request->memory_at)
		return qgpu_reserve_taken(client, request->parent, request->class, engine_of(call, request->class));
	memory = qgpu_object_find(client, param_u32(call, request->memory_at));
	return memory && qgpu_is_memory(memory->class) ? qgpu_mem_of(memory) : NULL;
}

/* Nothing would take its kernels off the card. Where an object of the table has the handle, the answer is not RM's. */
static long free_compute(struct qgpu_call *call, struct qgpu_client *client, const struct request *request)
{
	u32 handle = call->out.alloc.object;

	if (!qgpu_object_find(client, handle))
		qgpu_rm_free(client->handle, request->parent, handle);
	return qgpu_refuse_alloc(call, request->status_at, NV_ERR_INVALID_STATE);
}

/*
 * RM compares USERD's place in its memory with nothing (kchannelCreateUserdMemDesc_GV100): the card would write memory
 * of others. Error notifiers stand at the start of theirs, and RM compares the places of further ones with its size.
 */
static bool has_userd_beyond(const struct qgpu_call *call, struct qgpu_client *client, const struct request *request)
{
	u32 memory = param_u32(call, NV_CHANNEL_PARAMS_USERD_AT);
	u64 offset, size;

	if (!NV_IS_GPFIFO(request->class) || !memory)
		return false;
	memcpy(&offset, call->room + NV_CHANNEL_PARAMS_USERD_OFFSET_AT, sizeof(offset));
	size = qgpu_rm_memory_bytes(client->handle, memory);
	return size < NV_USERD_BYTES || offset > size - NV_USERD_BYTES;
}

/*
 * RM takes an address on another card, or one of host memory for another card, for one of the channel's card. The
 * device above a handle does not say which card it is. Semaphores in host memory RM writes itself.
 */
static bool is_on_other_card(struct qgpu_client *client, const struct request *request, u32 memory)
{
	int gpu = qgpu_memory_gpu(client, memory);

	if (request->class == NV_SEMAPHORE_SURFACE && !qgpu_object_find(client, memory))
		return false;
	return gpu < 0 || gpu != qgpu_object_gpu(client, request->parent);
}

/* RM's status for what the pod may not make below this parent or with this memory, NV_OK for anything else. */
static u32 judge(const struct qgpu_call *call, struct qgpu_client *client, const struct request *request)
{
	int i;

	if (request->flags & QGPU_ON_COMPUTE_ENGINE && !qgpu_is_in_compute_tsg(client, request->parent))
		return NV_ERR_INVALID_ARGUMENT;
	if (NV_IS_DMA_COPY(request->class) && !qgpu_may_run_on(client, request->parent, copied_by(call)))
		return NV_ERR_INVALID_ARGUMENT;
	if (qgpu_brings_tsg(client, request->parent, request->class) &&
	    !qgpu_engine_allowed(engine_of(call, request->class)))
		return NV_ERR_INVALID_ARGUMENT;	/* neither gates nor timeslices would bound it */
	for (i = 0; i < QGPU_WRITTEN_MAX; i++) {
		if (request->written[i] && !qgpu_written_may_be(client, request->written[i]))
			return NV_ERR_INVALID_OBJECT_HANDLE;
		if (request->written[i] && is_on_other_card(client, request, request->written[i]))
			return NV_ERR_INVALID_ARGUMENT;
	}
	if (has_userd_beyond(call, client, request))
		return NV_ERR_INVALID_ARGUMENT;
	if (!qgpu_space_may_be(client, request->parent, space_of(call, request->class)))
		return NV_ERR_INVALID_ARGUMENT;
	if (request->memory_at && !param_u32(call, request->memory_at))	/* RM would attach any number of pieces */
		return NV_ERR_NOT_SUPPORTED;
	return NV_OK;
}

/*
 * An object that the object table does not keep. RM_ALLOC_MEMORY fails after RM made the memory if it cannot be mapped
 * (escape.c: rm_create_mmap_context).
 */
static void note(const struct qgpu_call *call, struct qgpu_client *client, const struct request *request)
{
	u32 status = answered(call, request), handle = handle_of(call, request);

	if (status == NV_OK)
		qgpu_object_note(client, handle, request->class, qgpu_object_gpu(client, request->parent), true);
	else if (may_be_made(call, status) || (call->failed && call->nr == NV_ESC_RM_ALLOC_MEMORY))
		qgpu_free_unsaid(call, status, client, request->parent, handle);
}

/*
 * A new channel has no gate, and new compute cannot be preempted, before the module knows of it. RM makes the object and
 * then writes its answer; if the pod's page is absent, RM would wait as long as the pod likes. So an absent page is an
 * error.
 */
static long forward(struct qgpu_call *call, struct qgpu_client *client, const struct request *request)
{
	int tries = 0;
	long ret;

	if ((!NV_IS_GPFIFO(request->class) && !(request->flags & QGPU_ON_COMPUTE_ENGINE)) || !qgpu_toctou_sealed())
		return qgpu_call_forward(call);
	do {
		qgpu_call_fault_in(call, request->params);
		ret = qgpu_call_forward_open(call);
		if (call->sealed ? answered(call, request) != NV_ERR_INVALID_ADDRESS : ret != -EFAULT)
			break;
		if (call->sealed)	/* RM may have made it */
			qgpu_take_back(client, request->parent, handle_of(call, request));
	} while (++tries < QGPU_CALL_TRIES);
	return ret;
}

static long delivered(struct qgpu_call *call, long ret)
{
	if (call->sealed)
		qgpu_call_deliver(call, &ret);
	return ret;
}

static long alloc_locked(struct qgpu_call *call, struct qgpu_client *client, const struct request *request)
{
	struct qgpu_mem *mem = mem_for(call, client, request);
	u32 handle;
	int error;
	long ret;

	if (IS_ERR(mem))
		return qgpu_refuse_memory(call, max(qgpu_object_gpu(client, request->parent), 0), 0,
					  request->status_at);
	if (request->flags & QGPU_HOLDS_MEMORY)	/* RM holds another handle on it: treat it as exported */
		qgpu_objects_export(client, false);
	ret = forward(call, client, request);
	handle = handle_of(call, request);
	if (request->flags & QGPU_ON_COMPUTE_ENGINE && may_be_made(call, answered(call, request)) &&
	    !qgpu_make_preemptible(client, request->parent))
		return free_compute(call, client, request) ?: ret;
	if (request->memory_at && !call->sealed)	/* RM may have read another handle than this module */
		qgpu_objects_export(client, false);
	if (call->sealed && !qgpu_is_registered(request->class) && !request->memory_at) {
		note(call, client, request);
		return delivered(call, ret);
	}
	if (answered(call, request) != NV_OK) {
		qgpu_mem_put(mem);
		qgpu_free_unsaid(call, answered(call, request), client, request->parent, handle);
		return ret;
	}
	error = book(call, client, request, handle, mem);
	if (!error)
		return delivered(call, ret);
	qgpu_rm_free(client->handle, request->parent, handle);
	return qgpu_call_answer(call, request->status_at, error == -ENODEV ? NV_ERR_INVALID_STATE : NV_ERR_NO_MEMORY) ?:
	       ret;
}

/*
 * With a mask of figures RM looks through all objects of all clients (gpushareddataConstruct), and once more as the
 * page goes; gates and neighbours wait. Without a seal another thread could write the mask.
 */
static bool asks_for_figures(const struct qgpu_call *call, u32 class)
{
	return class == RM_USER_SHARED_DATA &&
	       (param_u32(call, NV_SHARED_DATA_PARAMS_MASK_AT) ||
		param_u32(call, NV_SHARED_DATA_PARAMS_MASK_AT + sizeof(u32)) || !qgpu_toctou_sealed());
}

static long alloc_paid(struct qgpu_call *call, struct qgpu_client *client, const struct request *request)
{
	long ret = qgpu_call_begin(call);

	if (ret)
		return ret;
	ret = alloc_locked(call, client, request);
	qgpu_gate_penalty_end(call->pod, QGPU_GATES_OPENED_TWICE);
	return ret;
}

static long alloc_object(struct qgpu_call *call, const struct request *request)
{
	enum qgpu_untracked_kind kind = qgpu_untracked_kind(request->class);
	struct qgpu_client *client = qgpu_client_lock_to_make(request->root, call->pod, kind);
	u32 status;
	long ret;

	if (IS_ERR(client))
		return PTR_ERR(client);
	if (!client)
		return qgpu_call_forward(call);
	status = judge(call, client, request);
	if (status != NV_OK)
		ret = qgpu_refuse_alloc(call, request->status_at, status);
	else if (request->object && qgpu_rm_has(client->handle, request->object))	/* so what is there later is new */
		ret = qgpu_call_answer(call, request->status_at, NV_ERR_INSERT_DUPLICATE_NAME);
	else if (!qgpu_object_fits(client, request->parent, request->class, request->number))
		ret = qgpu_call_answer(call, request->status_at, NV_ERR_INSUFFICIENT_RESOURCES);
	else if (asks_for_figures(call, request->class))
		ret = alloc_paid(call, client, request);
	else
		ret = alloc_locked(call, client, request);
	qgpu_client_unlock(client);
	return ret;
}

static long alloc_shared_page(struct qgpu_call *call, const struct request *request)
{
	long ret;

	do {
		ret = alloc_object(call, request);
	} while (qgpu_call_pay(call, &ret));
	return ret;
}

/* A removed pod may have more than are noted. */
static long alloc_event(struct qgpu_call *call, const struct request *request)
{
	struct qgpu_pod *pod = call->pod;
	bool fits;
	long ret;

	if (mutex_lock_killable(&pod->parts_lock))
		return -EINTR;
	fits = qgpu_object_part_fits(pod, QGPU_PART_EVENT);
	if (fits || READ_ONCE(pod->gone))
		ret = alloc_object(call, request);
	else
		ret = qgpu_refuse_alloc(call, request->status_at, NV_ERR_INSUFFICIENT_RESOURCES);
	if (fits && ret != -EINTR && answered(call, request) == NV_OK)
		qgpu_object_part_made(pod, QGPU_PART_EVENT, request->root, call->out.alloc.object);
	mutex_unlock(&pod->parts_lock);
	return ret;
}

static long vram(struct qgpu_call *call, const struct request *request, u64 size)
{
	return qgpu_vram_alloc(call, &(struct qgpu_vram){
		.video = true,
		.root = request->root,
		.parent = request->parent,
		.size = size,
		.handle_at = offsetof(struct nvos21, object),
		.status_at = request->status_at,
	});
}

static bool is_looked_at(u32 class)
{
	return class == NV01_MEMORY_LOCAL_USER || class == NV50_MEMORY_VIRTUAL || class == KEPLER_CHANNEL_GROUP_A ||
	       class == FERMI_VASPACE_A || class == FERMI_CONTEXT_SHARE_A || class == NV01_MEMORY_VIRTUAL ||
	       class == NV_SEMAPHORE_SURFACE || class == RM_USER_SHARED_DATA || NV_IS_GPFIFO(class) ||
	       NV_IS_DMA_COPY(class);
}

/*
 * Address spaces that RM has for a whole card: processes that name none of their own share them. And those of the NVLink
 * fabric: RM never frees one, or frees the card's own with it (vaspaceapiDestruct_IMPL, _gvaspaceFlaVaspaceDestruct).
 */
static bool is_refused_space(const struct qgpu_call *call, u32 class)
{
	u32 index = param_u32(call, NV_VASPACE_PARAMS_INDEX_AT);

	if (class != FERMI_VASPACE_A)
		return false;
	return (index != NV_VASPACE_NEW && index != NV_VASPACE_OF_DEVICE) ||
	       (param_u32(call, NV_VASPACE_PARAMS_FLAGS_AT) & NV_VASPACE_ALLOCATION_FLAGS_IS_FLA);
}

/* Allocations that use an unknown amount of the card: refused under a limit. */
static bool is_uncountable(const struct qgpu_call *call, u32 class)
{
	u32 flags = param_u32(call, NV_MEMORY_PARAMS_FLAGS_AT);

	return (class == NV50_MEMORY_VIRTUAL && qgpu_takes_tables(flags)) ||
	       (class == NV01_MEMORY_LOCAL_USER &&
		qgpu_chooses_place(flags, param_u32(call, NV_MEMORY_PARAMS_ATTR2_AT)));
}

/* Of a removed pod no class is refused; none of these is noted in the object table. */
static long refuse_class(struct qgpu_call *call, const struct request *request)
{
	if (READ_ONCE(call->pod->gone))
		return qgpu_call_forward(call);
	trace_qgpu_refuse(call->pod->id, call->nr, request->class, NV_ERR_INVALID_CLASS);
	return qgpu_refuse_alloc(call, request->status_at, NV_ERR_INVALID_CLASS);
}

long qgpu_alloc(struct qgpu_call *call)
{
	struct request request = request_of(call);
	const struct qgpu_class_rule *rule = qgpu_class_rule(request.class);
	u64 size = 0;

	if (call->size == sizeof(struct nvos64) && call->in.alloc_long.flags & NVOS64_FLAGS_FINN_SERIALIZED)
		return qgpu_call_answer(call, request.status_at, NV_ERR_INVALID_ARGUMENT);
	if (!rule || !(rule->flags & QGPU_BY_ALLOC))
		return refuse_class(call, &request);
	request.flags = rule->flags;
	request.memory_at = rule->memory_at;
	if (request.params && (rule->clients || rule->memory_at || is_looked_at(request.class)))
		qgpu_call_look(call, request.params, call->room, sizeof(call->room));
	look_at_written(call, &request);
	if (request.class == NV01_DEVICE_0)
		request.number = param_u32(call, NV_DEVICE_PARAMS_NUMBER_AT);
	if (!READ_ONCE(call->pod->gone) && qgpu_call_names_foreign(call, request.root, rule->clients))
		return qgpu_refuse_alloc(call, request.status_at, NV_ERR_INVALID_OBJECT_HANDLE);
	if (!READ_ONCE(call->pod->gone) && is_refused_space(call, request.class))
		return qgpu_refuse_alloc(call, request.status_at, NV_ERR_INVALID_ARGUMENT);
	if (is_uncountable(call, request.class) && qgpu_pod_limited(call->pod))
		return qgpu_refuse_alloc(call, request.status_at, NV_ERR_NOT_SUPPORTED);
	switch (request.class) {
	case NV01_ROOT:
	case NV01_ROOT_NON_PRIV:
	case NV01_ROOT_CLIENT:
		return alloc_client(call, &request);
	case NV01_EVENT:
	case NV01_EVENT_OS_EVENT:
		return alloc_event(call, &request);
	case RM_USER_SHARED_DATA:
		return alloc_shared_page(call, &request);
	case NV01_MEMORY_LOCAL_USER:
		if (call->params_size)
			memcpy(&size, call->room + NV_MEMORY_PARAMS_SIZE_AT, sizeof(size));
		return vram(call, &request, size);
	}
	return alloc_object(call, &request);
}

/* Only the process's own memory or system memory: by this call RM gives an administrator all of the card's memory. */
long qgpu_alloc_memory(struct qgpu_call *call)
{
	struct request request = request_of(call);
	const struct qgpu_class_rule *rule = qgpu_class_rule(request.class);

	if (!rule || !(rule->flags & QGPU_BY_ALLOC_MEMORY))
		return refuse_class(call, &request);
	if (!request.object && !READ_ONCE(call->pod->gone))	/* RM would choose a handle, and not say which */
		return qgpu_refuse_alloc(call, request.status_at, NV_ERR_INVALID_OBJECT_HANDLE);
	request.flags = rule->flags;
	return alloc_object(call, &request);
}
