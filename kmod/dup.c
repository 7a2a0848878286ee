// SPDX-License-Identifier: GPL-2.0
/*
 * dup.c - second names of objects: imports, and duplicates that a pod makes of its own objects. Memory of the pod's own
 * stays charged once, as long as it is known which memory it is. Other memory, as another pod's that comes by a
 * descriptor, is charged like a new allocation. A TSG may have further names in clients of its pod, each charged like a
 * TSG (docs/decisions/0044-groups.md). Any other object that carries a gate, or that takes channels with it when it is
 * freed, may have only one name.
 */
#include "client.h"
#include "context.h"
#include "dup.h"
#include "gate_penalty.h"
#include "mem.h"
#include "rm.h"
#include "toctou.h"
#include "tsg.h"
#include "vram_heap.h"

/* Returns an RM status. */
static u32 charge(const struct qgpu_arrival *arrival, struct qgpu_object *object, struct qgpu_mem *known)
{
	struct qgpu_mem *mem = known ?: qgpu_mem_get(arrival->spare);

	if (!known && (!arrival->gpus || qgpu_mem_resize(mem, arrival->gpus, arrival->size))) {
		qgpu_mem_put(mem);
		return NV_ERR_NO_MEMORY;
	}
	qgpu_mem_name(object, mem);
	return NV_OK;
}

/* Memory that is imported may lie on another card than the device above it: without knowing, no limit is passed. */
static void look_at_card(struct qgpu_arrival *arrival, const struct qgpu_object *object)
{
	if (!arrival->gpus && object->gpu >= 0)
		arrival->gpus = BIT(object->gpu) | (arrival->dup ? 0 : qgpu_pod_limited(arrival->client->pod));
}

/* Without a seal the pod may have said itself which handle RM has made. Returns an RM status. */
static u32 share_tsg(const struct qgpu_arrival *arrival, bool sealed)
{
	struct qgpu_client *client = arrival->client;
	struct qgpu_object *object;
	int ret = -ENODEV;

	if (!arrival->tsg || !sealed)
		return NV_ERR_NOT_SUPPORTED;
	object = qgpu_object_add(client, arrival->handle, arrival->parent, KEPLER_CHANNEL_GROUP_A, sealed);
	if (IS_ERR(object))
		return NV_ERR_NO_MEMORY;
	if (object->gpu == qgpu_gpu_index(arrival->tsg->gpu))	/* else a device without a card, or on another one */
		ret = qgpu_mem_resize(arrival->spare, BIT(object->gpu), qgpu_tsg_bytes(arrival->tsg->engine)) ?:
		      qgpu_enter_shared_tsg(client, object, arrival->tsg, arrival->stamp);
	if (!ret) {
		qgpu_mem_name(object, qgpu_mem_get(arrival->spare));
		return NV_OK;
	}
	qgpu_objects_remove(client, arrival->handle);
	return ret == -ENODEV ? NV_ERR_INVALID_STATE : ret == -EDQUOT ? NV_ERR_NO_MEMORY : NV_ERR_INSUFFICIENT_RESOURCES;
}

/*
 * An object of the fabric keeps its memory as a further handle does. RM does not say which memory that is. So the object
 * that was duplicated must be known. Memory that another pod has put there is charged like a new allocation. Of an
 * import nothing is known: its exporter is charged. Returns an RM status.
 */
static u32 share_fabric(struct qgpu_arrival *arrival, bool sealed, qgpu_finder find, void *about)
{
	const struct nvos55 *dup = arrival->dup;
	struct qgpu_client *client = arrival->client;
	struct qgpu_mem *known = find(arrival, about);
	struct qgpu_object *object;
	u32 status = NV_OK;

	if (dup && (!sealed || !qgpu_client_stamp(dup->client_src, dup->object_src))) {
		qgpu_mem_put(known);
		return NV_ERR_NOT_SUPPORTED;
	}
	object = qgpu_object_add(client, arrival->handle, arrival->parent, NV_MEMORY_FABRIC, sealed);
	if (IS_ERR(object)) {
		qgpu_mem_put(known);
		return NV_ERR_NO_MEMORY;
	}
	look_at_card(arrival, object);
	if (dup && arrival->size)
		status = charge(arrival, object, known);
	else
		qgpu_mem_put(known);
	if (status == NV_OK)
		qgpu_object_stamp(object);
	else
		qgpu_objects_remove(client, arrival->handle);
	return status;
}

/* An object that the object table does not keep. Returns an RM status. */
static u32 note(const struct qgpu_arrival *arrival, u32 class, bool sealed)
{
	bool fits = qgpu_object_fits(arrival->client, arrival->parent, class, 0);

	qgpu_object_note(arrival->client, arrival->handle, class, arrival->lies_on, sealed);
	return fits ? NV_OK : NV_ERR_INSUFFICIENT_RESOURCES;
}

/* Ask RM what it is. A status other than NV_OK: the object must go. */
static u32 book(struct qgpu_arrival *arrival, bool sealed, qgpu_finder find, void *about)
{
	struct qgpu_client *client = arrival->client;
	struct qgpu_object *object;
	u32 class, status;

	if (!sealed && qgpu_object_find(client, arrival->handle))	/* a forged answer: it is booked already */
		return NV_OK;
	if (qgpu_rm_class(client->handle, arrival->handle, &class) != NV_OK)
		return sealed ? NV_ERR_NO_MEMORY : NV_OK;
	if (qgpu_is_physical(class))
		return NV_ERR_INSUFFICIENT_PERMISSIONS;
	if (class == RM_USER_SHARED_DATA) {
		atomic64_inc(&client->pod->refused_allocs);
		return NV_ERR_NOT_SUPPORTED;
	}
	if (class == KEPLER_CHANNEL_GROUP_A)
		return share_tsg(arrival, sealed);
	if (class == NV_MEMORY_FABRIC)
		return share_fabric(arrival, sealed, find, about);
	/* objects below it would have no gate, or go unseen; a graphics context keeps buffers of a TSG */
	if (qgpu_is_registered(class) || class == KERNEL_GRAPHICS_CONTEXT)
		return NV_ERR_NOT_SUPPORTED;
	if (class != NV01_MEMORY_LOCAL_USER)
		return note(arrival, class, sealed);
	if (qgpu_rm_memory_size(client->handle, arrival->handle, &arrival->size) != NV_OK)
		return NV_ERR_NO_MEMORY;
	object = qgpu_object_add(client, arrival->handle, arrival->parent, class, sealed);
	if (IS_ERR(object))
		return NV_ERR_NO_MEMORY;
	look_at_card(arrival, object);
	object->gpu = arrival->lies_on;
	status = charge(arrival, object, find(arrival, about));
	if (status == NV_OK)
		qgpu_object_stamp(object);
	else
		qgpu_objects_remove(client, arrival->handle);
	return status;
}

u32 qgpu_arrive(struct qgpu_call *call, struct qgpu_arrival *arrival, qgpu_finder find, void *about)
{
	u32 status = book(arrival, call->sealed, find, about);

	if (status != NV_OK)
		qgpu_take_back(arrival->client, arrival->parent, arrival->handle);
	return status;
}

/* lent: what the source's handle means, whose client is locked; NULL: that is not known. */
static struct qgpu_mem *find_source(const struct qgpu_arrival *arrival, void *lent)
{
	return lent && qgpu_mem_pod(lent) == arrival->client->pod ? qgpu_mem_get(lent) : NULL;
}

/*
 * A process that ends with a handle on a TSG opens the gate of the TSG's other handles too, and does not wait. So the
 * pod pays before it has another handle.
 */
static int find_tsg(const struct qgpu_call *call, struct qgpu_arrival *arrival)
{
	const struct nvos55 *dup = &call->in.dup;
	int ret;

	arrival->tsg = arrival->source ? qgpu_client_tsg(arrival->source, dup->object_src) : NULL;
	if (!arrival->tsg)
		return 0;
	ret = qgpu_gate_penalty_pay(call->pod);
	if (ret)
		return ret;
	arrival->stamp = qgpu_tsg_stamp(arrival->tsg, dup->client_src, dup->object_src);
	return 0;
}

static long dup_locked(struct qgpu_call *call, struct qgpu_arrival *arrival)
{
	struct qgpu_mem *lent = qgpu_client_mem(call->in.dup.client_src, call->in.dup.object_src);
	u32 status;
	long ret;

	if (arrival->source)
		arrival->lies_on = qgpu_memory_gpu(arrival->source, call->in.dup.object_src);
	if (lent)
		arrival->size = qgpu_mem_size(lent);
	ret = qgpu_call_forward(call);
	if (call->out.dup.status == NV_OK) {
		arrival->handle = call->out.dup.object;
		status = qgpu_arrive(call, arrival, find_source, call->sealed ? lent : NULL);
		if (status != NV_OK)
			ret = qgpu_call_answer(call, offsetof(struct nvos55, status), status) ?: ret;
	}
	qgpu_mem_put(lent);
	return ret;
}

/*
 * Handles can be guessed. RM gives away what another pod shares with all, as CUDA IPC does, and what was made by a
 * process whose number the caller's maker has (client_resource.c: cliresShareCallback_IMPL). So only the pod's clients
 * lend objects. A client that is older than the module takes those of other such clients, too. Without a seal another
 * thread could name another pod's client after the check.
 */
static bool may_take(const struct qgpu_call *call, const struct qgpu_client *client, const struct qgpu_client *source)
{
	if (READ_ONCE(call->pod->gone))
		return true;
	return qgpu_toctou_sealed() && (source || (!client && !qgpu_client_pod(call->in.dup.client_src)));
}

static long refuse(struct qgpu_call *call)
{
	return qgpu_refuse_alloc(call, offsetof(struct nvos55, status), NV_ERR_INSUFFICIENT_PERMISSIONS);
}

static long dup_to(struct qgpu_call *call, struct qgpu_arrival *arrival, struct qgpu_client *client)
{
	long ret;

	if (!may_take(call, client, arrival->source))
		return refuse(call);
	if (!client)
		return qgpu_call_forward(call);
	arrival->client = client;
	arrival->spare = qgpu_mem_new(call->pod, 0, 0, GFP_KERNEL_ACCOUNT);
	if (IS_ERR(arrival->spare)) {
		ret = qgpu_call_answer(call, offsetof(struct nvos55, status), NV_ERR_NO_MEMORY);
	} else {
		ret = dup_locked(call, arrival);
		qgpu_mem_put(arrival->spare);
	}
	return ret;
}

/*
 * While RM works the source's handle means what it did, and the source's client is the pod's: what RM gives another
 * handle could be used at once, whatever the module found out later.
 */
static long dup_from(struct qgpu_call *call, struct qgpu_arrival *arrival, struct qgpu_client *client)
{
	long ret = qgpu_client_lock_also(client, arrival->source);

	if (ret == -ESTALE) {
		ret = refuse(call);
	} else if (!ret) {
		ret = dup_to(call, arrival, client);
		mutex_unlock(&arrival->source->lock);
		mutex_unlock(&client->lock);
	}
	qgpu_client_put(client);
	return ret;
}

static long dup(struct qgpu_call *call, struct qgpu_arrival *arrival)
{
	struct qgpu_client *client = qgpu_client_lock_to_take(call->in.dup.client, call->pod, 1);
	struct qgpu_client *source = arrival->source;
	long ret;

	if (IS_ERR(client))
		return PTR_ERR(client);
	if (client && source && source != client)
		return dup_from(call, arrival, client);
	ret = dup_to(call, arrival, client);
	if (client)
		qgpu_client_unlock(client);
	return ret;
}

long qgpu_dup(struct qgpu_call *call)
{
	struct qgpu_arrival arrival = {
		.parent = call->in.dup.parent ?: call->in.dup.client,
		.lies_on = -1,
		.dup = &call->in.dup,
		.source = qgpu_client_get(call->in.dup.client_src, call->pod),
	};
	long ret = find_tsg(call, &arrival);

	if (!ret)
		ret = dup(call, &arrival);
	if (arrival.tsg)
		qgpu_tsg_put(arrival.tsg);
	if (arrival.source)
		qgpu_client_put(arrival.source);
	return ret;
}

/*
 * RM notes each sharing with a client in that client, without bound, and goes through the notes under its lock when the
 * client ends (rs_client.c, clientAddAccessBackRef). CUDA shares with all. Without a seal another thread could name
 * another pod's object after the check.
 */
static bool may_share(const struct qgpu_call *call, const struct qgpu_client *client)
{
	return client && qgpu_toctou_sealed() && (u16)call->in.share.policy.how != RS_SHARE_TYPE_CLIENT &&
	       !qgpu_rm_is_shared_page(client->handle, call->in.share.object);
}

long qgpu_share(struct qgpu_call *call)
{
	struct qgpu_client *client = qgpu_client_lock(call->in.share.client, call->pod);
	long ret;

	if (IS_ERR(client))
		return PTR_ERR(client);
	if (!may_share(call, client) && !READ_ONCE(call->pod->gone)) {
		if (client)
			qgpu_client_unlock(client);
		return qgpu_refuse_alloc(call, offsetof(struct nvos57, status), NV_ERR_INSUFFICIENT_PERMISSIONS);
	}
	ret = qgpu_call_forward(call);
	if (client)
		qgpu_client_unlock(client);
	return ret;
}
