// SPDX-License-Identifier: GPL-2.0
/*
 * alloc.c - what a pod allocates: clients, devices, TSGs and channels go into the register. Video memory is video.c's.
 *
 * Parameters behind pointers are read by RM after we looked, so nothing here rests on them: the class of what was made
 * is asked of RM.
 */
#include <linux/uaccess.h>

#include "client.h"
#include "escape.h"
#include "events.h"
#include "rm.h"
#include "slice.h"

/* What the forms of the call have in common. */
struct request {
	u32 root, parent, object, class;
	u64 params;
	size_t status_at;
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

static u32 param_u32(const struct request *request, size_t at)
{
	u32 value = 0;

	if (!request->params || get_user(value, (u32 __user *)(uintptr_t)(request->params + at)))
		return 0;
	return value;
}

/*
 * RM can have made something and say no: where it cannot write the parameters back it says so, and what it made stays
 * (alloc_free.c:serverAllocApiCopyOut). So a no is not believed either.
 */
static long alloc_client(struct qgpu_call *call, const struct request *request)
{
	struct qgpu_client *client = qgpu_client_new(call->pod);
	u32 handle, class;
	bool said, sure;
	long ret;
	int error;

	/* What is not in the register is not limited: rather none. */
	if (!client)
		return qgpu_call_answer(call, request->status_at, NV_ERR_NO_MEMORY);
	ret = qgpu_call_forward(call);
	handle = call->out.alloc.object;
	said = answered(call, request) == NV_OK;
	sure = said && call->sealed;
	if (!sure && qgpu_rm_class(handle, handle, &class) != NV_OK) {
		qgpu_client_discard(client);
		return ret;
	}
	error = qgpu_client_add(client, &call->file->clients, handle, sure);
	if (error && sure) {
		qgpu_rm_free(handle, handle, handle);
		return qgpu_call_answer(call, request->status_at, NV_ERR_NO_MEMORY);
	}
	if (error && said)	/* a forged handle is not ours to free */
		qgpu_pod_flag(call->pod, QGPU_POD_TAMPERED, QGPU_EVENT_TAMPERED);
	return ret;
}

/* Of a call that RM said no to: its handle is free, or had its object before; else what it made goes again. */
void qgpu_free_unsaid(struct qgpu_client *client, u32 parent, u32 handle)
{
	u32 class;

	if (qgpu_object_find(client, handle) || qgpu_rm_class(client->handle, handle, &class) != NV_OK)
		return;
	if (class == NV01_MEMORY_LOCAL_USER || qgpu_is_physical(class) || qgpu_is_registered(class))
		qgpu_rm_free(client->handle, parent, handle);
}

/*
 * Which card a device is on is asked of RM, by its first subdevice: the number in the call's parameters can be changed
 * after RM has read it. Until then the device has no card, and nothing that needs one is made below it.
 */
static void learn_gpu(struct qgpu_client *client, struct qgpu_object *subdevice)
{
	struct qgpu_object *device = qgpu_object_find(client, subdevice->parent);
	u32 gpu_id;

	if (!device || device->class != NV01_DEVICE_0 ||
	    qgpu_rm_gpu_id(client->handle, subdevice->handle, &gpu_id) != NV_OK)
		return;
	device->gpu = qgpu_gpu_find(gpu_id);
	subdevice->gpu = device->gpu;
}

static void learn_memory(struct qgpu_client *client, struct qgpu_object *subdevice)
{
	u64 bytes;

	if (subdevice->gpu < 0 || READ_ONCE(qgpu_gpus[subdevice->gpu].memory))
		return;
	if (qgpu_rm_fb_total(client->handle, subdevice->handle, &bytes) == NV_OK)
		WRITE_ONCE(qgpu_gpus[subdevice->gpu].memory, bytes);
}

static int register_channel(struct qgpu_client *client, struct qgpu_object *channel, const struct request *request)
{
	struct qgpu_object *parent = qgpu_object_find(client, request->parent);
	struct qgpu_tsg *tsg = parent && parent->class == KEPLER_CHANNEL_GROUP_A ? parent->tsg : NULL;
	int ret;

	if (channel->gpu < 0)
		return -ENODEV;
	if (!tsg) {
		tsg = qgpu_tsg_add(client, &qgpu_gpus[channel->gpu], 0, qgpu_object_device(client, request->parent),
				   param_u32(request, NV_CHANNEL_PARAMS_ENGINE_AT));
		if (IS_ERR(tsg))
			return PTR_ERR(tsg);
	}
	ret = qgpu_channel_add(tsg, channel->handle);
	if (!ret)
		channel->tsg = tsg;
	else if (qgpu_tsg_hidden(tsg))
		qgpu_tsg_remove(tsg);
	return ret;
}

static int register_tsg(struct qgpu_client *client, struct qgpu_object *object, const struct request *request)
{
	struct qgpu_tsg *tsg;

	if (object->gpu < 0)
		return -ENODEV;
	tsg = qgpu_tsg_add(client, &qgpu_gpus[object->gpu], object->handle,
			   qgpu_object_device(client, request->parent), param_u32(request, NV_TSG_PARAMS_ENGINE_AT));
	if (IS_ERR(tsg))
		return PTR_ERR(tsg);
	object->tsg = tsg;
	return 0;
}

static int register_object(struct qgpu_client *client, const struct request *request, u32 handle, u32 class, bool sure)
{
	struct qgpu_object *object = qgpu_object_add(client, handle, request->parent, class, sure);
	int ret = 0;

	if (IS_ERR(object))
		return PTR_ERR(object) == -EEXIST ? 0 : PTR_ERR(object);
	if (class == NV20_SUBDEVICE_0) {
		learn_gpu(client, object);
		learn_memory(client, object);
	} else if (class == KEPLER_CHANNEL_GROUP_A) {
		ret = register_tsg(client, object, request);
	} else if (NV_IS_GPFIFO(class)) {
		ret = register_channel(client, object, request);
	}
	if (ret)
		qgpu_objects_remove(client, handle);
	return ret;
}

bool qgpu_is_registered(u32 class)
{
	return class == NV01_DEVICE_0 || class == NV20_SUBDEVICE_0 || class == KEPLER_CHANNEL_GROUP_A ||
	       class == FERMI_VASPACE_A || class == FERMI_CONTEXT_SHARE_A || NV_IS_GPFIFO(class);
}

/* The class is RM's, not the call's: without a seal the two can differ. */
static int book(struct qgpu_call *call, struct qgpu_client *client, const struct request *request, u32 handle)
{
	u32 class;

	if (qgpu_rm_class(client->handle, handle, &class) != NV_OK)
		return call->sealed ? -EIO : 0;
	if (class == NV01_MEMORY_LOCAL_USER)
		return -EINVAL;
	return qgpu_is_registered(class) ? register_object(client, request, handle, class, call->sealed) : 0;
}

static long alloc_object(struct qgpu_call *call, const struct request *request)
{
	struct qgpu_client *client = qgpu_client_lock(request->root, call->pod);
	int error;
	long ret;

	if (IS_ERR(client))
		return PTR_ERR(client);
	if (!client)
		return qgpu_call_forward(call);
	if (request->class == NV_MEMORY_FABRIC && qgpu_objects_keep(client)) {	/* an export: see control.c */
		ret = qgpu_call_answer(call, request->status_at, NV_ERR_NO_MEMORY);
		goto out;
	}
	ret = qgpu_call_forward(call);
	if (call->sealed && !qgpu_is_registered(request->class))
		goto out;
	if (answered(call, request) != NV_OK) {
		qgpu_free_unsaid(client, request->parent, call->out.alloc.object);
		goto out;
	}
	error = book(call, client, request, call->out.alloc.object);
	if (error) {
		qgpu_rm_free(client->handle, request->parent, call->out.alloc.object);
		ret = qgpu_call_answer(call, request->status_at,
				       error == -ENODEV ? NV_ERR_INVALID_STATE : NV_ERR_NO_MEMORY) ?: ret;
	}
out:
	qgpu_client_unlock(client);
	return ret;
}

static long video(struct qgpu_call *call, const struct request *request, u64 size)
{
	return qgpu_video_alloc(call, &(struct qgpu_video){
		.root = request->root,
		.parent = request->parent,
		.size = size,
		.handle_at = offsetof(struct nvos21, object),
		.status_at = request->status_at,
	});
}

long qgpu_alloc(struct qgpu_call *call)
{
	struct request request = request_of(call);
	u64 size = 0;

	if (qgpu_is_physical(request.class))
		return qgpu_refuse_class(call, request.status_at);
	if (call->size == sizeof(struct nvos64) && call->in.alloc_long.flags & NVOS64_FLAGS_FINN_SERIALIZED)
		return qgpu_call_answer(call, request.status_at, NV_ERR_INVALID_ARGUMENT);
	switch (request.class) {
	case NV01_ROOT:
	case NV01_ROOT_NON_PRIV:
	case NV01_ROOT_CLIENT:
		return alloc_client(call, &request);
	case NV01_MEMORY_LOCAL_USER:
		if (request.params && copy_from_user(&size, (void __user *)(uintptr_t)(request.params +
						     NV_MEMORY_PARAMS_SIZE_AT), sizeof(size)))
			size = 0;	/* RM cannot read it either */
		return video(call, &request, size);
	}
	return alloc_object(call, &request);
}

long qgpu_alloc_memory(struct qgpu_call *call)
{
	struct request request = request_of(call);

	if (qgpu_is_physical(request.class))
		return qgpu_refuse_class(call, request.status_at);
	if (request.class != NV01_MEMORY_LOCAL_USER)
		return alloc_object(call, &request);
	return video(call, &request, call->in.memory.limit + 1);
}
