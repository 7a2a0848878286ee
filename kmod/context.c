// SPDX-License-Identifier: GPL-2.0
/*
 * context.c - TSGs and channels that a pod makes: finds the TSG of an object, and charges the memory that RM takes on
 * the card for objects without a memory handle. tsg.c sets gates and timeslices.
 */
#include <linux/sizes.h>

#include "context.h"
#include "gpu.h"
#include "mem.h"
#include "nvrm.h"
#include "object.h"
#include "rm.h"
#include "rule_lookup.h"
#include "tsg.h"

/*
 * For a TSG RM allocates context-switch buffers and page tables: 9.6 MiB in all were measured for a CUDA context on an
 * H200. A TSG that names no engine is a compute TSG.
 */
#define COMPUTE_TSG_BYTES	SZ_16M
#define OTHER_TSG_BYTES		SZ_1M

static bool is_compute(u32 engine)
{
	return !engine || NV_IS_COMPUTE(engine);
}

static struct qgpu_tsg *tsg_above(struct qgpu_client *client, u32 parent)
{
	const struct qgpu_object *above = qgpu_object_find(client, parent);

	return above && above->class == KEPLER_CHANNEL_GROUP_A ? above->tsg : NULL;
}

u64 qgpu_tsg_bytes(u32 engine)
{
	return is_compute(engine) ? COMPUTE_TSG_BYTES : OTHER_TSG_BYTES;
}

bool qgpu_brings_tsg(struct qgpu_client *client, u32 parent, u32 class)
{
	return class == KEPLER_CHANNEL_GROUP_A || (NV_IS_GPFIFO(class) && !tsg_above(client, parent));
}

static u64 taken_for(struct qgpu_client *client, u32 parent, u32 class, u32 engine)
{
	if (class == NV01_DEVICE_0 || class == FERMI_VASPACE_A)	/* a device has an address space */
		return QGPU_SPACE_BYTES;
	return qgpu_brings_tsg(client, parent, class) ? qgpu_tsg_bytes(engine) : 0;
}

/*
 * Even a pod at its limit may make this many, because otherwise no program could query the card. They are charged all
 * the same.
 */
#define FREE_DEVICES 16

static struct qgpu_mem *reserve_device(struct qgpu_pod *pod, u64 size)
{
	struct qgpu_mem *mem = qgpu_mem_new(pod, qgpu_pod_limited(pod), size, GFP_KERNEL_ACCOUNT);

	if (PTR_ERR_OR_ZERO(mem) != -EDQUOT || atomic_read(&pod->nr_devices) >= FREE_DEVICES)
		return mem;
	mem = qgpu_mem_new(pod, qgpu_pod_limited(pod), 0, GFP_KERNEL_ACCOUNT);
	if (!IS_ERR(mem))
		qgpu_mem_grow(mem, size);
	return mem;
}

struct qgpu_mem *qgpu_reserve_taken(struct qgpu_client *client, u32 parent, u32 class, u32 engine)
{
	u64 size = taken_for(client, parent, class, engine);
	int gpu = qgpu_object_gpu(client, parent);

	if (class == NV01_DEVICE_0)
		return reserve_device(client->pod, size);
	if (class == FERMI_VASPACE_A && gpu < 0)	/* its device has no subdevice yet */
		return qgpu_mem_new(client->pod, qgpu_pod_limited(client->pod), size, GFP_KERNEL_ACCOUNT);
	if (gpu < 0 || !size)
		return NULL;	/* without a card RM refuses it */
	return qgpu_mem_new(client->pod, BIT(gpu), size, GFP_KERNEL_ACCOUNT);
}

void qgpu_device_learned(struct qgpu_object *device)
{
	if (device->mem && device->gpu >= 0)
		qgpu_mem_resize(device->mem, BIT(device->gpu), QGPU_SPACE_BYTES);
}

bool qgpu_is_in_compute_tsg(struct qgpu_client *client, u32 channel)
{
	const struct qgpu_object *object = qgpu_object_find(client, channel);

	return object && object->tsg && is_compute(object->tsg->engine);
}

bool qgpu_make_preemptible(struct qgpu_client *client, u32 channel)
{
	struct qgpu_object *object = qgpu_object_find(client, channel);
	struct qgpu_tsg *tsg = object ? object->tsg : NULL;
	u32 device = qgpu_object_device(client, channel);
	struct nv2080_preemption_mode mode = {
		.flags = NV2080_PREEMPTION_MODE_FLAGS_CILP,
		.compute = NV2080_PREEMPTION_MODE_COMPUTE_CILP,
	};
	u32 subdevice, status;

	if (!tsg)
		return false;
	if (READ_ONCE(tsg->preemptible))
		return true;
	mode.channel = qgpu_tsg_hidden(tsg) ? channel : object->parent;
	if (qgpu_rm_subdevice(client->handle, device, &subdevice) != NV_OK)
		return false;
	status = qgpu_rm_control(client->handle, subdevice, NV2080_GR_SET_CTXSW_PREEMPTION_MODE, &mode, sizeof(mode));
	if (status == NV_OK) {
		WRITE_ONCE(tsg->preemptible, true);
		return true;
	}
	pr_warn_ratelimited("qgpu: compute preemption not enabled (%#x)\n", status);
	return status == NV_ERR_NOT_SUPPORTED;	/* the card cannot */
}

/*
 * Whether a TSG is a copy TSG for certain. Without a seal RM may have read another engine than this module, and some
 * copy engines are on the compute engine's runlist, where copies take the time of kernels (on an H200 COPY0 and COPY1;
 * CUDA uses others).
 */
static bool is_for_copies(struct qgpu_client *client, u32 device, u32 engine, bool sealed)
{
	u32 subdevice;

	return sealed && NV_IS_COPY(engine) && qgpu_rm_subdevice(client->handle, device, &subdevice) == NV_OK &&
	       qgpu_rm_copies_apart(client->handle, subdevice, engine);
}

bool qgpu_may_run_on(struct qgpu_client *client, u32 channel, u32 engine)
{
	const struct qgpu_object *object = qgpu_object_find(client, channel);
	u32 device, own;

	if (!object || !object->tsg || !NV_IS_GPFIFO(object->class) || !qgpu_engine_allowed(engine))
		return false;
	own = object->tsg->engine;
	if (engine == own || (!NV_IS_COPY(engine) && !NV_IS_COPY(own)))
		return true;
	device = qgpu_object_device(client, channel);
	return is_for_copies(client, device, own, true) == is_for_copies(client, device, engine, true);
}

bool qgpu_may_reset(struct qgpu_client *client, u32 channel, u32 engine)
{
	const struct qgpu_object *object = qgpu_object_find(client, channel);

	return !engine || (object && object->tsg && engine == (object->tsg->engine ?: NV2080_ENGINE_TYPE_GR0));
}

/* The TSG that the object is, or (handle 0) the one that RM makes for the object. */
static struct qgpu_tsg *add(struct qgpu_client *client, const struct qgpu_object *object, u32 handle, u32 engine,
			    bool sealed)
{
	u32 device = qgpu_object_device(client, object->parent);

	if (!qgpu_device_subdevices(client, device))
		return ERR_PTR(-ENODEV);
	return qgpu_tsg_add(client, &qgpu_gpus[object->gpu], handle, device, engine,
			    is_for_copies(client, device, engine, sealed));
}

static int enter_as_channel(struct qgpu_client *client, struct qgpu_object *channel, u32 engine, bool sealed)
{
	struct qgpu_tsg *tsg = tsg_above(client, channel->parent) ?: add(client, channel, 0, engine, sealed);
	int ret;

	if (IS_ERR(tsg))
		return PTR_ERR(tsg);
	ret = qgpu_channel_add(tsg, client->handle, channel->handle);
	if (ret) {
		if (qgpu_tsg_hidden(tsg))
			qgpu_tsg_drop(tsg, client->handle, 0, false);
		return ret;
	}
	channel->tsg = tsg;
	qgpu_object_stamp(channel);
	return 0;
}

int qgpu_enter_tsg(struct qgpu_client *client, struct qgpu_object *object, u32 engine, bool sealed)
{
	struct qgpu_tsg *tsg;

	if (object->class != KEPLER_CHANNEL_GROUP_A && !NV_IS_GPFIFO(object->class))
		return 0;
	if (object->gpu < 0)
		return -ENODEV;
	if (NV_IS_GPFIFO(object->class))
		return enter_as_channel(client, object, engine, sealed);
	tsg = add(client, object, object->handle, engine, sealed);
	if (IS_ERR(tsg))
		return PTR_ERR(tsg);
	smp_store_release(&object->tsg, tsg);	/* pairs with qgpu_client_tsg() */
	return 0;
}

int qgpu_enter_shared_tsg(struct qgpu_client *client, struct qgpu_object *object, struct qgpu_tsg *tsg, u64 stamp)
{
	u32 device = qgpu_object_device(client, object->parent);
	int ret;

	if (!qgpu_device_subdevices(client, device))
		return -ENODEV;
	ret = qgpu_tsg_share(tsg, stamp, client, object->handle, device);
	if (!ret)
		smp_store_release(&object->tsg, tsg);	/* pairs with qgpu_client_tsg() */
	return ret;
}
