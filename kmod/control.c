// SPDX-License-Identifier: GPL-2.0
/*
 * control.c - a pod's RM controls. A control without a row in rules.h is refused as unknown to RM; a scheduling control
 * is refused for lack of permission. Some of the others have a handler here or in export.c. Queries of memory size
 * return the pod's limit.
 */
#include <linux/slab.h>
#include <linux/uaccess.h>

#include "client.h"
#include "context.h"
#include "control.h"
#include "events.h"
#include "export.h"
#include "gate_penalty.h"
#include "mem.h"
#include "object_part.h"
#include "rule_lookup.h"
#include "toctou.h"
#include "trace.h"
#include "tsg.h"

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

/* libcuda sets its compute TSG's timeslice at start and fails on a refusal, so note the wish and answer OK. */
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
 * No timeslice and no gate takes the engine from a kernel that cannot be preempted. libcuda asks for an allowed mode;
 * for programs that ask for none, context.c sets it.
 */
static long set_preemption(struct qgpu_call *call)
{
	struct nv2080_preemption_mode *mode = (struct nv2080_preemption_mode *)call->room;

	qgpu_call_look(call, call->in.control.params, mode, sizeof(*mode));
	if (mode->flags & NV2080_PREEMPTION_MODE_FLAGS_CILP && mode->compute != NV2080_PREEMPTION_MODE_COMPUTE_CILP)
		return refuse(call, NV_ERR_INSUFFICIENT_PERMISSIONS);
	/* RM gives the context buffers for preemption within a draw, which cannot be counted */
	if (mode->flags & NV2080_PREEMPTION_MODE_FLAGS_GFXP && mode->graphics != NV2080_PREEMPTION_MODE_GRAPHICS_WFI &&
	    qgpu_pod_limited(call->pod))
		return refuse(call, NV_ERR_INSUFFICIENT_PERMISSIONS);
	return qgpu_call_forward(call);
}

/*
 * RM notes each policy that names a client in that client, whosever it is, and reads all notes when it ends. Without a
 * seal another thread could name a client after the check.
 */
static long set_share_policy(struct qgpu_call *call)
{
	struct rs_share_policy *policy = (struct rs_share_policy *)call->room;

	qgpu_call_look(call, call->in.control.params, policy, sizeof(*policy));
	if (!qgpu_toctou_sealed() || (u16)policy->how == RS_SHARE_TYPE_CLIENT)
		return refuse(call, NV_ERR_INSUFFICIENT_PERMISSIONS);
	return qgpu_call_forward(call);
}

static long bind(struct qgpu_call *call)
{
	struct qgpu_client *client = qgpu_client_lock(call->in.control.client, call->pod);
	u32 engine;
	long ret;

	if (IS_ERR(client))
		return PTR_ERR(client);
	if (!client)
		return qgpu_call_forward(call);
	qgpu_call_look(call, call->in.control.params, &engine, sizeof(engine));
	if (qgpu_may_run_on(client, call->in.control.object, engine))
		ret = qgpu_call_forward(call);
	else
		ret = refuse(call, NV_ERR_INVALID_ARGUMENT);
	qgpu_client_unlock(client);
	return ret;
}

/* Forward a call for whose length gates or other pods' calls wait. */
static long forward_paid(struct qgpu_call *call)
{
	long ret = qgpu_gate_penalty_pay_and_begin(call->pod);

	if (ret)
		return ret;
	ret = qgpu_call_forward(call);
	qgpu_gate_penalty_end(call->pod, QGPU_GATES_OPENED);
	return ret;
}

/*
 * For each entry RM looks through all objects of the process, once for each of its devices, and other calls wait. So
 * only the first entry of a process gets an answer.
 */
static int ask_once(const struct qgpu_call *call, struct nv2080_pid_infos *asked)
{
	struct nv2080_pid_infos __user *user = (void __user *)(uintptr_t)call->in.control.params;
	u32 i, first, num = min_t(u32, asked->num, ARRAY_SIZE(asked->infos));

	for (i = 1; i < num; i++) {
		for (first = 0; asked->infos[first].pid != asked->infos[i].pid; first++)
			;
		if (first == i)
			continue;
		asked->infos[i].index = NV2080_PID_INFO_INDEX_NONE;
		if (put_user(asked->infos[i].index, &user->infos[i].index))
			return -EFAULT;
	}
	return 0;
}

/* RM asks all clients there are. It hides processes outside the caller's pid namespace. */
static long ask_for_pids(struct qgpu_call *call)
{
	struct nv2080_pid_infos *asked;
	long ret;

	if (call->in.control.cmd != NV2080_GPU_GET_PID_INFO || call->in.control.params_size != sizeof(*asked))
		return forward_paid(call);
	asked = kmalloc(sizeof(*asked), GFP_KERNEL_ACCOUNT);
	if (!asked)
		return answer(call, NV_ERR_NO_MEMORY);
	qgpu_call_look(call, call->in.control.params, asked, sizeof(*asked));
	ret = ask_once(call, asked) ? answer(call, NV_ERR_INVALID_ADDRESS) : forward_paid(call);
	kfree(asked);
	return ret;
}

/*
 * libcuda takes its TSG off the engine when it destroys a context. The pod gives away only its own turn, because RM
 * looks TSGs up among the clients of the file only. A preemption that does not wait is undefined when repeated
 * (ctrla06c.h), and a timeout chosen by the caller would decide when RM considers the card hung. Gates wait for RM's
 * locks in the meantime, so the pod pays the gate penalty, as for an open gate.
 */
static long preempt(struct qgpu_call *call)
{
	struct nva06c_preempt *asked = (struct nva06c_preempt *)call->room;

	qgpu_call_look(call, call->in.control.params, asked, sizeof(*asked));
	if (!asked->wait || asked->manual_timeout)
		return refuse(call, NV_ERR_INSUFFICIENT_PERMISSIONS);
	return forward_paid(call);
}

/*
 * A program may start and reset its own channels, and RM may put them on the card; if the gate is closed, it is closed
 * again before the call returns.
 */
static long start_open(struct qgpu_call *call, struct qgpu_client *client)
{
	long ret = qgpu_call_begin(call);

	if (ret)
		return ret;
	ret = qgpu_call_forward_open(call);
	qgpu_gate_penalty_end(call->pod, qgpu_objects_reclose(client) ? QGPU_GATES_OPENED : QGPU_GATES_UNTOUCHED);
	return ret;
}

/* Neighbours may run on the engine that is reset with a channel. Without a seal another thread could name it later. */
static bool resets_other_engine(struct qgpu_call *call, struct qgpu_client *client)
{
	struct nv906f_reset_channel *reset = (struct nv906f_reset_channel *)call->room;

	if (call->in.control.cmd != NV906F_RESET_CHANNEL)
		return false;
	qgpu_call_look(call, call->in.control.params, reset, sizeof(*reset));
	return !qgpu_toctou_sealed() || !qgpu_may_reset(client, call->in.control.object, reset->engine);
}

static long try_to_start(struct qgpu_call *call)
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
	if (resets_other_engine(call, client)) {
		qgpu_client_unlock(client);
		return refuse(call, NV_ERR_INVALID_ARGUMENT);
	}
	do {
		/* faults the pages in; if that fails, RM reports it */
		if (copy_from_user(present, params, min_t(size_t, call->in.control.params_size, sizeof(present))))
			tries = QGPU_CALL_TRIES;
		ret = start_open(call, client);
	} while (!call->owes && !qgpu_call_deliver(call, &ret) && ++tries < QGPU_CALL_TRIES);
	qgpu_client_unlock(client);
	return ret;
}

static long start_channels(struct qgpu_call *call)
{
	long ret;

	do {
		ret = try_to_start(call);
	} while (qgpu_call_pay(call, &ret));
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

/* Only the answer that the pod sees changes. Nothing depends on it, so reading it from user memory is safe. */
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

/* RM passes these to the firmware without checking whose client they name (RmGssLegacyRpcCmd). */
static long forward_to_firmware(struct qgpu_call *call)
{
	if (qgpu_client_pod(call->in.control.client) != call->pod->id)
		return refuse(call, NV_ERR_INVALID_CLIENT);
	return qgpu_call_forward(call);
}

static bool names_foreign_client(struct qgpu_call *call, const struct qgpu_control_rule *rule)
{
	const struct nvos54 *control = &call->in.control;

	if (!rule->clients || (rule->clients_size && rule->clients_size != control->params_size))
		return false;
	qgpu_call_look(call, control->params, call->room, min_t(u32, control->params_size, sizeof(call->room)));
	return qgpu_call_names_foreign(call, control->client, rule->clients);
}

static long handle(struct qgpu_call *call, const struct qgpu_control_rule *rule)
{
	switch (rule->action) {
	case QGPU_CONTROL_SCHEDULES:
		return refuse(call, NV_ERR_INSUFFICIENT_PERMISSIONS);
	case QGPU_CONTROL_TIMESLICE:
		return set_timeslice(call);
	case QGPU_CONTROL_PREEMPTION_MODE:
		return set_preemption(call);
	case QGPU_CONTROL_SHARE_POLICY:
		return set_share_policy(call);
	case QGPU_CONTROL_BIND:
		return bind(call);
	case QGPU_CONTROL_PREEMPT:
		return preempt(call);
	case QGPU_CONTROL_PAID:
		return forward_paid(call);
	case QGPU_CONTROL_PIDS_BY_NAMESPACE:
		return ask_for_pids(call);
	case QGPU_CONTROL_START_CHANNELS:
		return start_channels(call);
	case QGPU_CONTROL_FB_INFO:
		return fb_info(call);
	case QGPU_CONTROL_EXPORT:
		return qgpu_export(call, rule->memory_at);
	case QGPU_CONTROL_IMPORT:
		return qgpu_import(call);
	case QGPU_CONTROL_FIRMWARE:
		return forward_to_firmware(call);
	case QGPU_CONTROL_PASS:
		break;
	}
	return qgpu_call_forward(call);
}

/* Counted without RM's own answer, too: RM may have done it. */
static long count(struct qgpu_call *call, const struct qgpu_control_rule *rule, enum qgpu_object_part kind, bool more)
{
	const struct nvos54 *control = &call->in.control;
	struct qgpu_pod *pod = call->pod;
	long ret;

	if (mutex_lock_killable(&pod->parts_lock))
		return -EINTR;
	if (more && !qgpu_object_part_fits(pod, kind)) {
		ret = refuse(call, NV_ERR_INSUFFICIENT_RESOURCES);
	} else {
		ret = handle(call, rule);
		if (call->sealed ? call->out.control.status == NV_OK : more)
			qgpu_object_part_count(pod, kind, control->client, control->object, more);
	}
	mutex_unlock(&pod->parts_lock);
	return ret;
}

static long handle_counted(struct qgpu_call *call, const struct qgpu_control_rule *rule)
{
	switch (rule->number) {
	case NV_SEMAPHORE_SURFACE_BIND_CHANNEL:
		return count(call, rule, QGPU_PART_BINDING, true);
	case NV_SEMAPHORE_SURFACE_UNBIND_CHANNEL:
		return count(call, rule, QGPU_PART_BINDING, false);
	case NV00FD_ATTACH_MEM:
		return count(call, rule, QGPU_PART_PIECE, true);
	case NV00FD_DETACH_MEM:
		return count(call, rule, QGPU_PART_PIECE, false);
	case NV906F_RESET_CHANNEL:
		return start_channels(call);
	}
	return handle(call, rule);
}

/* Of a removed pod nothing is refused, and only what it keeps is noted. */
static long watch(struct qgpu_call *call, const struct qgpu_control_rule *rule)
{
	bool keeps = rule && (rule->action == QGPU_CONTROL_EXPORT || rule->action == QGPU_CONTROL_IMPORT);

	return keeps ? handle(call, rule) : qgpu_call_forward(call);
}

long qgpu_control(struct qgpu_call *call)
{
	const struct qgpu_control_rule *rule = qgpu_control_rule(call->in.control.cmd);

	if (READ_ONCE(call->pod->gone))
		return watch(call, rule);
	if (!rule)
		return refuse(call, NV_ERR_NOT_SUPPORTED);
	if (rule->action != QGPU_CONTROL_SCHEDULES && call->in.control.flags & NVOS54_FLAGS_FINN_SERIALIZED)
		return refuse(call, NV_ERR_INVALID_ARGUMENT);
	if (names_foreign_client(call, rule))
		return refuse(call, NV_ERR_INVALID_OBJECT_HANDLE);
	return handle_counted(call, rule);
}
