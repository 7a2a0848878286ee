// SPDX-License-Identifier: GPL-2.0
/*
 * call.c - one call of a pod, to the driver and back. The arguments are read once; RM acts on that copy, and RM's
 * answer is taken from it too. The callers decide what the call means.
 *
 * The driver's result and errno pass through untouched.
 */
#include <linux/kernel.h>
#include <linux/mm.h>
#include <linux/uaccess.h>

#include "call.h"
#include "gate_penalty.h"
#include "toctou.h"

void qgpu_call_look(struct qgpu_call *call, u64 params_at, void *params, u32 size)
{
	unsigned long missing = copy_from_user(params, (void __user *)(uintptr_t)params_at, size);

	memset((char *)params + size - missing, 0, missing);
	call->params_at = params_at;
	call->params_size = size;
	call->params = params;
}

bool qgpu_call_names_foreign(const struct qgpu_call *call, u32 own, u8 words)
{
	u32 at, client;

	for (at = 0; words && at + sizeof(client) <= call->params_size; words >>= 1, at += sizeof(client)) {
		memcpy(&client, (const char *)call->params + at, sizeof(client));
		if (words & 1 && client && client != own)
			return true;
	}
	return false;
}

long qgpu_call_forward(struct qgpu_call *call)
{
	struct qgpu_toctou seal = {
		.nr = call->nr,
		.size = call->size,
		.in = &call->in,
		.out = &call->out,
		.params_at = call->params_at,
		.params_size = call->params_size,
		.params = call->params,
		.pod = call->pod,
		.nr_exports = call->nr_exports,
		.exports = call->exports,
	};
	long ret;

	qgpu_toctou_begin(&seal);
	ret = call->driver(call->file->filp, qgpu_escape_word(call->nr, call->size), (unsigned long)call->user);
	qgpu_toctou_end(&seal);
	call->sealed = seal.answered;
	call->failed = seal.failed;
	call->carried = seal.carried;
	call->noted = seal.noted;
	if (!ret && !seal.answered && qgpu_toctou_sealed())
		qgpu_pod_flag(call->pod, QGPU_POD_UNCHECKED, QGPU_EVENT_POD_CHANGED);
	if (seal.tampered)
		qgpu_pod_flag(call->pod, QGPU_POD_TAMPERED, QGPU_EVENT_TAMPERED);
	if (call->sealed ? seal.failed : ret || copy_from_user(&call->out, call->user, call->size))
		memset(&call->out, 0xff, call->size);	/* all ones is no RM status: not OK */
	return ret;
}

/*
 * While the driver waits for user memory the gate would stay open, and user memory may never answer (userfaultfd,
 * FUSE). So page faults are errors in the meantime. If RM was not asked yet, the call can be repeated; if it was,
 * qgpu_call_deliver() delivers the answer.
 */
long qgpu_call_forward_open(struct qgpu_call *call)
{
	long ret;

	pagefault_disable();
	ret = qgpu_call_forward(call);
	pagefault_enable();
	return ret;
}

static void fault_in(u64 at)
{
	struct page *pages[2];	/* nothing is longer than one */
	int i, n = get_user_pages_fast(at & PAGE_MASK, ARRAY_SIZE(pages), FOLL_WRITE, pages);

	for (i = 0; i < n; i++)
		put_page(pages[i]);
}

void qgpu_call_fault_in(const struct qgpu_call *call, u64 params_at)
{
	fault_in((uintptr_t)call->user);
	if (params_at)
		fault_in(params_at);
}

bool qgpu_call_deliver(struct qgpu_call *call, long *ret)
{
	if (*ret != -EFAULT)
		return true;
	if (!call->sealed)	/* faults the page in; the bytes do not matter */
		return copy_from_user(&call->out, call->user, call->size);
	if (!call->failed && !copy_to_user(call->user, &call->out, call->size))
		*ret = 0;
	return true;
}

long qgpu_call_begin(struct qgpu_call *call)
{
	long ret = qgpu_gate_penalty_begin(call->pod);

	call->owes = ret == -EAGAIN;
	return ret;
}

bool qgpu_call_pay(struct qgpu_call *call, long *ret)
{
	if (!call->owes)
		return false;
	call->owes = false;
	*ret = qgpu_gate_penalty_pay(call->pod);
	return !*ret;
}

long qgpu_call_answer(struct qgpu_call *call, size_t status_at, u32 status)
{
	return put_user(status, (u32 __user *)(call->user + status_at)) ? -EFAULT : 0;
}

