// SPDX-License-Identifier: GPL-2.0
/*
 * escape.c - a pod's calls, by number: unwraps them, hands the interesting ones to whoever knows them, forwards the
 * rest. Allocations are alloc.c's, controls are control.c's, duplicates dup.c's; freeing is here.
 *
 * The driver's result and errno pass through untouched. RM goes by number and size and ignores the other bits of an
 * ioctl word, so we do too. A size that RM does not know it refuses itself.
 */
#include <linux/ioctl.h>
#include <linux/kernel.h>
#include <linux/uaccess.h>

#include "client.h"
#include "debt.h"
#include "escape.h"
#include "interpose.h"
#include "rm.h"
#include "rule_lookup.h"
#include "seal.h"
#include "trace.h"

static unsigned int word(u32 nr, u32 size)
{
	return _IOC(_IOC_READ | _IOC_WRITE, 'F', nr, size);
}

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
		if (words & 1 && client && client != own && qgpu_client_pod(client) != call->pod->id)
			return true;
	}
	return false;
}

long qgpu_call_forward(struct qgpu_call *call)
{
	struct qgpu_seal seal = {
		.nr = call->nr,
		.size = call->size,
		.in = &call->in,
		.out = &call->out,
		.params_at = call->params_at,
		.params_size = call->params_size,
		.params = call->params,
	};
	long ret;

	qgpu_seal_begin(&seal);
	ret = qgpu_driver_ioctl(call->file->filp, word(call->nr, call->size), (unsigned long)call->user);
	qgpu_seal_end(&seal);
	call->sealed = seal.answered;
	call->failed = seal.failed;
	if (seal.tampered)
		qgpu_pod_flag(call->pod, QGPU_POD_TAMPERED, QGPU_EVENT_TAMPERED);
	if (call->sealed ? seal.failed : ret || copy_from_user(&call->out, call->user, call->size))
		memset(&call->out, 0xff, call->size);	/* no status of RM's is all ones: not OK */
	return ret;
}

/*
 * As long as the driver waits for user memory the gate would stay open, and what is behind user memory may never answer
 * (userfaultfd, FUSE). So a page that is not there is an error meanwhile: before RM was asked the call can be made
 * again, afterwards the answer is delivered from here.
 */
long qgpu_call_forward_open(struct qgpu_call *call)
{
	long ret;

	pagefault_disable();
	ret = qgpu_call_forward(call);
	pagefault_enable();
	return ret;
}

bool qgpu_call_deliver(struct qgpu_call *call, long *ret)
{
	if (*ret != -EFAULT)
		return true;
	if (!call->sealed)	/* the page is made present, the bytes are not looked at */
		return copy_from_user(&call->out, call->user, call->size);
	if (!call->failed && !copy_to_user(call->user, &call->out, call->size))
		*ret = 0;
	return true;
}

long qgpu_call_answer(struct qgpu_call *call, size_t status_at, u32 status)
{
	return put_user(status, (u32 __user *)(call->user + status_at)) ? -EFAULT : 0;
}

/* Without a seal the answer could be the pod's own; then RM is asked again, and may have given the handle away. */
static bool is_gone(const struct qgpu_call *call, struct qgpu_client *client, const struct qgpu_freeing *freeing)
{
	u32 status;

	if (call->sealed) {
		memcpy(&status, (const char *)&call->out + freeing->status_at, sizeof(status));
		return status == NV_OK;
	}
	return qgpu_rm_gone(client->handle, freeing->handle) ||
	       (freeing->handle == client->handle && !qgpu_client_listed(client));
}

/*
 * A channel goes with its USERD, where that lies in memory which the process described itself (kernel_channel_gv100.c).
 * Which memory that is stands in parameters that a pod can change under RM's eyes; so any such memory counts, and as it
 * is not in the register, RM is asked.
 */
static bool may_be_userd(struct qgpu_client *client, u32 handle)
{
	u32 class;

	return qgpu_objects_run(client) && qgpu_rm_class(client->handle, handle, &class) == NV_OK &&
	       class == NV01_MEMORY_SYSTEM_OS_DESCRIPTOR;
}

/*
 * The gates of what goes away are opened first, or RM would wait for channels that cannot run. A client's entry gives
 * up its handle before, for RM may hand that out again at once.
 */
static long free_open(struct qgpu_call *call, struct qgpu_client *client, const struct qgpu_freeing *freeing,
		      bool *gone)
{
	struct qgpu_object *object = qgpu_object_find(client, freeing->handle);
	bool root = freeing->handle == client->handle, opened;
	/* channels, and TSGs with them, go with the address space, context share or memory that they use */
	bool used = !root && (!object || object->class == FERMI_VASPACE_A || object->class == FERMI_CONTEXT_SHARE_A);
	long ret;

	ret = qgpu_debt_begin(call->pod);
	if (ret)
		return ret;
	opened = qgpu_objects_hold(client, object ? freeing->handle : client->handle);
	if (root)
		WRITE_ONCE(client->dead, true);
	ret = qgpu_call_forward_open(call);
	*gone = is_gone(call, client, freeing);
	if (*gone)
		qgpu_objects_remove(client, freeing->handle);
	else if (root)
		WRITE_ONCE(client->dead, false);
	if (*gone && used)
		qgpu_objects_reconcile(client);
	qgpu_objects_unhold(client);
	qgpu_debt_end(call->pod, opened);
	if (*gone && root)
		qgpu_client_unlink(client);
	return ret;
}

static long free_memory(struct qgpu_call *call, struct qgpu_client *client, const struct qgpu_freeing *freeing)
{
	long ret = qgpu_call_forward(call);

	if (is_gone(call, client, freeing))
		qgpu_objects_remove(client, freeing->handle);
	return ret;
}

static long free_locked(struct qgpu_call *call, struct qgpu_client *client, const struct qgpu_freeing *freeing)
{
	struct qgpu_object *object = qgpu_object_find(client, freeing->handle);
	bool gone = false;
	int tries = 0;
	long ret;

	if (object && object->class == NV01_MEMORY_LOCAL_USER)
		return free_memory(call, client, freeing);
	if (object && qgpu_object_needed(client, object))
		return qgpu_call_answer(call, freeing->status_at, NV_ERR_INVALID_STATE);
	if (!object && freeing->handle != client->handle && !may_be_userd(client, freeing->handle))
		return qgpu_call_forward(call);
	do {
		ret = free_open(call, client, freeing, &gone);
	} while (!qgpu_call_deliver(call, &ret) && !gone && ++tries < QGPU_CALL_TRIES);
	return ret;
}

long qgpu_free(struct qgpu_call *call, const struct qgpu_freeing *freeing)
{
	struct qgpu_client *client = qgpu_client_lock(freeing->root, call->pod);
	long ret;

	if (IS_ERR(client))
		return PTR_ERR(client);
	if (!client)
		return qgpu_call_forward(call);
	ret = free_locked(call, client, freeing);
	qgpu_client_unlock(client);
	return ret;
}

static long free_object(struct qgpu_call *call)
{
	return qgpu_free(call, &(struct qgpu_freeing){
		.root = call->in.free.root,
		.handle = call->in.free.object,
		.status_at = offsetof(struct nvos00, status),
	});
}

/* Which calls are looked into, and the sizes they have on every branch known. */
static long (*handler_of(u32 nr, u32 size))(struct qgpu_call *call)
{
	switch (nr) {
	case NV_ESC_RM_ALLOC:
		return size == sizeof(struct nvos21) || size == sizeof(struct nvos64) ? qgpu_alloc : NULL;
	case NV_ESC_RM_ALLOC_OBJECT:
		return size == sizeof(struct nvos05) ? qgpu_alloc : NULL;
	case NV_ESC_RM_ALLOC_MEMORY:
		return size == sizeof(struct nvos02_fd) ? qgpu_alloc_memory : NULL;
	case NV_ESC_RM_FREE:
		return size == sizeof(struct nvos00) ? free_object : NULL;
	case NV_ESC_RM_CONTROL:
		return size == sizeof(struct nvos54) ? qgpu_control : NULL;
	case NV_ESC_RM_DUP_OBJECT:
		return size == sizeof(struct nvos55) ? qgpu_dup : NULL;
	case NV_ESC_RM_VID_HEAP_CONTROL:
		return size == sizeof(struct nvos32) ? qgpu_vid_heap : NULL;
	}
	return NULL;
}

/*
 * A wrapped call is copied once and made anew as the plain call it stands for, so that what was looked at is what
 * runs. The driver allows one level, and one byte more of size than an ioctl word can say; no call of RM's is that
 * long.
 */
static int unwrap(unsigned int *cmd, unsigned long *arg)
{
	struct nv_xfer xfer;

	if (_IOC_NR(*cmd) != NV_ESC_IOCTL_XFER_CMD || _IOC_SIZE(*cmd) != sizeof(xfer))
		return 0;
	if (copy_from_user(&xfer, (void __user *)*arg, sizeof(xfer)))
		return -EFAULT;
	if (xfer.size >= NV_IOCTL_XFER_MAX_SIZE || xfer.cmd > _IOC_NRMASK || xfer.cmd == NV_ESC_IOCTL_XFER_CMD)
		return -EINVAL;
	*cmd = word(xfer.cmd, xfer.size);
	*arg = xfer.ptr;
	return 0;
}

/*
 * What cannot be counted is refused under a limit: a dma-buf keeps memory that has no handle any more; RM's own mappings
 * take page tables of the card (CUDA's are UVM's). These calls have no status of RM's that would stand at one place.
 */
static bool is_refused(const struct qgpu_pod *pod, u32 nr)
{
	switch (qgpu_escape_refusal(nr)) {
	case QGPU_REFUSED_ALWAYS:
		return true;
	case QGPU_REFUSED_UNDER_LIMIT:
		return qgpu_pod_limited(pod);
	case QGPU_NOT_REFUSED:
		break;
	}
	return false;
}

long qgpu_escape(struct qgpu_file *file, unsigned int cmd, unsigned long arg)
{
	long (*handler)(struct qgpu_call *call);
	struct qgpu_call call;
	long ret = unwrap(&cmd, &arg);

	if (ret)
		return ret;
	/* It would make RM take this file for the other one, whose clients would outlive our forgetting them. */
	if (_IOC_NR(cmd) == NV_ESC_REGISTER_FD && iminor(file_inode(file->filp)) == NV_MINOR_CONTROL)
		return -EINVAL;
	if (is_refused(file->pod, _IOC_NR(cmd)))
		return -EOPNOTSUPP;
	handler = handler_of(_IOC_NR(cmd), _IOC_SIZE(cmd));
	if (!handler)
		return qgpu_driver_ioctl(file->filp, cmd, arg);
	call.file = file;
	call.pod = file->pod;
	call.user = (void __user *)arg;
	call.nr = _IOC_NR(cmd);
	call.size = _IOC_SIZE(cmd);
	call.params_at = 0;
	call.params_size = 0;
	call.params = NULL;
	if (copy_from_user(&call.in, call.user, call.size))
		return -EFAULT;
	if (down_killable(&call.pod->calls))
		return -EINTR;
	ret = handler(&call);
	up(&call.pod->calls);
	return ret;
}
