// SPDX-License-Identifier: GPL-2.0
/*
 * control.c - a pod's RM controls. RM lets every process schedule itself: longer timeslices, channels back on the
 * GPU, kernels that nothing preempts. Those are refused in RM's own words. Questions about memory get the pod's limit for an answer.
 */
#include <linux/uaccess.h>

#include "client.h"
#include "debt.h"
#include "escape.h"
#include "events.h"
#include "mem.h"
#include "trace.h"
#include "tsg.h"

/* Scheduling that is not a pod's business, on itself or on others; SDK/ctrl/ctrl*.h */
static const u32 refused[] = {
	0x80170f,	/* NV0080 FIFO_SET_CHANNEL_PROPERTIES: a timeslice by another name */
	0x801711,	/* NV0080 FIFO_STOP_RUNLIST */
	0x801712,	/* NV0080 FIFO_START_RUNLIST */
	0x20800194,	/* NV2080 GPU_SET_COMPUTE_POLICY_CONFIG */
	0x2080110b,	/* NV2080 FIFO_DISABLE_CHANNELS: the gate itself */
	0x20801110,	/* NV2080 FIFO_CONFIG_CTXSW_TIMEOUT */
	0x20801115,	/* NV2080 FIFO_RUNLIST_SET_SCHED_POLICY */
	0x20801117,	/* NV2080 FIFO_DISABLE_USERMODE_CHANNELS */
	0x2080111a,	/* NV2080 FIFO_DISABLE_CHANNELS_FOR_KEY_ROTATION */
	0x2080111b,	/* the same, V2 */
	0x20801121,	/* NV2080 FIFO_OBJSCHED_SET_STATE */
	0x20801211,	/* NV2080 GR_CTXSW_PREEMPTION_BIND, which sets the mode as well */
	0xa06c0107,	/* NVA06C SET_INTERLEAVE_LEVEL */
	0xa06c0110,	/* NVA06C MAKE_REALTIME */
	0xa06f0109,	/* NVA06F SET_INTERLEAVE_LEVEL */
	0xa06f0111,	/* NVA06F RESTART_RUNLIST */
};

static bool is_refused(u32 cmd)
{
	size_t i;

	/* A TSG's controls are known by their plain numbers; what firmware makes of others nobody knows. */
	if (cmd & NV_CONTROL_GSS_LEGACY && cmd >> 16 == KEPLER_CHANNEL_GROUP_A)
		return true;
	for (i = 0; i < ARRAY_SIZE(refused); i++) {
		if (refused[i] == cmd)
			return true;
	}
	return false;
}

static long answer(struct qgpu_call *call, u32 status)
{
	return qgpu_call_answer(call, offsetof(struct nvos54, status), status);
}

static long refuse(struct qgpu_call *call, u32 status)
{
	atomic64_inc(&call->pod->refused_controls);
	trace_qgpu_refuse(call->pod->id, call->nr, call->in.control.cmd, status);
	qgpu_event(QGPU_EVENT_CONTROL_REFUSED, call->pod->id, 0, call->in.control.cmd);
	return answer(call, status);
}

/* libcuda sets its compute TSG's timeslice at start and does not expect a no, so the wish is noted and answered. */
static long set_timeslice(struct qgpu_call *call)
{
	struct qgpu_client *client;
	struct qgpu_object *object;
	u64 wish_us;

	if (copy_from_user(&wish_us, (void __user *)(uintptr_t)call->in.control.params, sizeof(wish_us)))
		return answer(call, NV_ERR_INVALID_ARGUMENT);
	client = qgpu_client_lock(call->in.control.client, call->pod);
	if (IS_ERR(client))
		return PTR_ERR(client);
	object = client ? qgpu_object_find(client, call->in.control.object) : NULL;
	if (object && object->tsg)
		qgpu_tsg_wish(object->tsg, wish_us);
	else
		object = NULL;
	if (client)
		qgpu_client_unlock(client);
	return object ? answer(call, NV_OK) : refuse(call, NV_ERR_INSUFFICIENT_PERMISSIONS);
}

/*
 * No timeslice and no gate takes the engine from a kernel that cannot be preempted. libcuda asks for what is allowed;
 * for who asks for nothing context.c does.
 */
static long set_preemption(struct qgpu_call *call)
{
	struct nv2080_preemption_mode *mode = (struct nv2080_preemption_mode *)call->room;

	qgpu_call_look(call, call->in.control.params, mode, sizeof(*mode));
	if (mode->flags & NV2080_PREEMPTION_MODE_FLAGS_CILP && mode->compute != NV2080_PREEMPTION_MODE_COMPUTE_CILP)
		return refuse(call, NV_ERR_INSUFFICIENT_PERMISSIONS);
	return qgpu_call_forward(call);
}

/*
 * libcuda takes its TSG off the engine when a context is destroyed, and makes no other where it may not: the turn that is
 * given away is the pod's own, for RM knows TSGs of the file's clients only. What does not wait is undefined when repeated
 * (ctrla06c.h), and a timeout of the caller's own would say when RM takes the card for stuck. Gates wait for RM's locks
 * meanwhile, so the pod pays as for one that was open.
 */
static long preempt(struct qgpu_call *call)
{
	struct nva06c_preempt *asked = (struct nva06c_preempt *)call->room;
	long ret;

	qgpu_call_look(call, call->in.control.params, asked, sizeof(*asked));
	if (!asked->wait || asked->manual_timeout)
		return refuse(call, NV_ERR_INSUFFICIENT_PERMISSIONS);
	ret = qgpu_debt_begin(call->pod);
	if (ret)
		return ret;
	ret = qgpu_call_forward(call);
	qgpu_debt_end(call->pod, true);
	return ret;
}

/* A program's own start of its channels is let through, and a closed gate closed again before it returns. */
static long start_open(struct qgpu_call *call, struct qgpu_client *client)
{
	long ret = qgpu_debt_begin(call->pod);

	if (ret)
		return ret;
	ret = qgpu_call_forward_open(call);
	qgpu_debt_end(call->pod, qgpu_objects_reclose(client));
	return ret;
}

static long start_channels(struct qgpu_call *call)
{
	const void __user *params = (void __user *)(uintptr_t)call->in.control.params;
	struct qgpu_client *client = qgpu_client_lock(call->in.control.client, call->pod);
	int tries = 0;
	u8 present[16];
	long ret;

	if (IS_ERR(client))
		return PTR_ERR(client);
	if (!client)
		return qgpu_call_forward(call);
	do {
		/* so that they are present; if they are not, RM will say so */
		if (copy_from_user(present, params, min_t(size_t, call->in.control.params_size, sizeof(present))))
			tries = QGPU_CALL_TRIES;
		ret = start_open(call, client);
	} while (!qgpu_call_deliver(call, &ret) && ++tries < QGPU_CALL_TRIES);
	qgpu_client_unlock(client);
	return ret;
}

static u32 shown(u32 index, u32 kib, u64 limit_kib, u64 left_kib)
{
	switch (index) {
	case NV2080_FB_INFO_RAM_SIZE:
	case NV2080_FB_INFO_TOTAL_RAM_SIZE:
	case NV2080_FB_INFO_HEAP_SIZE:
	case NV2080_FB_INFO_MAPPABLE_HEAP:
	case NV2080_FB_INFO_USABLE_RAM:
	case NV2080_FB_INFO_PROTECTED_TOTAL:
		return min_t(u64, kib, limit_kib);
	case NV2080_FB_INFO_LARGEST_FREE:
	case NV2080_FB_INFO_HEAP_FREE:
	case NV2080_FB_INFO_PROTECTED_FREE:
		return min_t(u64, kib, left_kib);
	}
	return kib;
}

static long rewrite_list(struct qgpu_call *call, int gpu, u8 __user *list, u32 entries)
{
	u64 limit = READ_ONCE(call->pod->shares[gpu].memory_limit), used, peak, left;
	struct nv2080_fb_entry entry;
	u32 i;

	qgpu_mem_usage(call->pod, gpu, &used, &peak);
	left = limit > used ? limit - used : 0;
	for (i = 0; i < entries; i++, list += sizeof(entry)) {
		if (copy_from_user(&entry, list, sizeof(entry)))
			return -EFAULT;
		entry.data = shown(entry.index, entry.data, limit >> 10, left >> 10);
		if (copy_to_user(list, &entry, sizeof(entry)))
			return -EFAULT;
	}
	return 0;
}

/* Only what the pod is shown: nothing rests on these answers, so user memory may be believed. */
static long fb_info(struct qgpu_call *call)
{
	struct nvos54 *control = &call->in.control;
	u8 __user *params = (u8 __user *)(uintptr_t)control->params;
	struct qgpu_client *client = qgpu_client_lock(control->client, call->pod);
	u32 entries, fitting;
	u64 list;
	long ret;
	int gpu;

	if (IS_ERR(client))
		return PTR_ERR(client);
	gpu = client ? qgpu_object_gpu(client, control->object) : -1;
	if (client)
		qgpu_client_unlock(client);
	ret = qgpu_call_forward(call);
	if (ret || gpu < 0 || call->out.control.status != NV_OK)
		return ret;
	if (READ_ONCE(call->pod->shares[gpu].memory_limit) == U64_MAX)
		return ret;
	if (get_user(entries, (u32 __user *)params))
		return -EFAULT;
	if (control->cmd == NV2080_FB_GET_INFO) {
		if (copy_from_user(&list, params + 8, sizeof(list)))
			return -EFAULT;
		return rewrite_list(call, gpu, (u8 __user *)(uintptr_t)list, min(entries, 256u));
	}
	fitting = control->params_size < NV2080_FB_INFO_ENTRY_AT ? 0 :
		  (control->params_size - NV2080_FB_INFO_ENTRY_AT) / sizeof(struct nv2080_fb_entry);
	return rewrite_list(call, gpu, params + NV2080_FB_INFO_ENTRY_AT, min(entries, fitting));
}

long qgpu_control(struct qgpu_call *call)
{
	struct nvos54 *control = &call->in.control;

	if (control->flags & NVOS54_FLAGS_FINN_SERIALIZED)
		return refuse(call, NV_ERR_INVALID_ARGUMENT);
	if (is_refused(control->cmd))
		return refuse(call, NV_ERR_INSUFFICIENT_PERMISSIONS);
	if (control->cmd == NVA06C_SET_TIMESLICE)
		return set_timeslice(call);
	if (control->cmd == NV2080_GR_SET_CTXSW_PREEMPTION_MODE)
		return set_preemption(call);
	if (control->cmd == NVA06C_PREEMPT)
		return preempt(call);
	if (control->cmd == NVA06C_GPFIFO_SCHEDULE || NVXX6F_GPFIFO_SCHEDULE(control->cmd) ||
	    control->cmd == NV83DE_RESUME_CONTEXT)
		return start_channels(call);
	if (control->cmd == NV2080_FB_GET_INFO || control->cmd == NV2080_FB_GET_INFO_V2)
		return fb_info(call);
	if (qgpu_is_export(control->cmd))
		return qgpu_export(call);
	if (qgpu_is_import(control->cmd))
		return qgpu_import(call);
	/* RM passes these to the firmware without asking whose client they name (RmGssLegacyRpcCmd). */
	if (control->cmd & NV_CONTROL_GSS_LEGACY && qgpu_client_pod(control->client) != call->pod->id)
		return refuse(call, NV_ERR_INVALID_CLIENT);
	return qgpu_call_forward(call);
}
