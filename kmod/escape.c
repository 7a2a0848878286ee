// SPDX-License-Identifier: GPL-2.0
/*
 * escape.c - dispatches a pod's calls by number: unwraps them, passes the inspected ones to their handlers, forwards
 * the rest. Allocations go to alloc.c, controls to control.c, duplicates to dup.c, frees to free.c, OS events to
 * os_event.c, mappings to map.c.
 *
 * RM looks at number and size and ignores the other bits of an ioctl word; so does this file. RM itself refuses a size
 * that it does not know.
 */
#include <linux/file.h>
#include <linux/ioctl.h>
#include <linux/uaccess.h>

#include "alloc.h"
#include "client.h"
#include "control.h"
#include "dup.h"
#include "escape.h"
#include "free.h"
#include "map.h"
#include "os_event.h"
#include "rule_lookup.h"
#include "vram_heap.h"

/*
 * From then on RM takes the calls on this file for calls on the control file, whose clients they may use. So both must
 * be of one pod. The number is sealed; another thread may still give it to another file meanwhile: see is_foreign().
 */
static long register_fd(struct qgpu_call *call)
{
	struct file *filp = fget(call->in.ctl_fd);
	struct qgpu_file *control;
	long ret = -EINVAL;

	if (!filp)
		return -EINVAL;
	if (filp->f_op == call->file->filp->f_op && iminor(file_inode(filp)) == NV_MINOR_CONTROL) {
		control = qgpu_file_of(filp);
		if (IS_ERR(control))
			ret = PTR_ERR(control);
		else
			ret = control && control->pod == call->pod ? qgpu_call_forward(call) : -EPERM;
	}
	fput(filp);
	return ret;
}

/* Which calls are inspected, and their sizes on every known branch. */
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
		return size == sizeof(struct nvos00) ? qgpu_free_object : NULL;
	case NV_ESC_RM_CONTROL:
		return size == sizeof(struct nvos54) ? qgpu_control : NULL;
	case NV_ESC_RM_DUP_OBJECT:
		return size == sizeof(struct nvos55) ? qgpu_dup : NULL;
	case NV_ESC_RM_SHARE:
		return size == sizeof(struct nvos57) ? qgpu_share : NULL;
	case NV_ESC_RM_VID_HEAP_CONTROL:
		return size == sizeof(struct nvos32) ? qgpu_vid_heap : NULL;
	case NV_ESC_RM_MAP_MEMORY:
		return size == sizeof(struct nvos33_fd) ? qgpu_map_memory : NULL;
	case NV_ESC_RM_UNMAP_MEMORY:
		return size == sizeof(struct nvos34) ? qgpu_unmap_memory : NULL;
	case NV_ESC_RM_MAP_MEMORY_DMA:	/* since 580 longer */
		return size == 56 || size == 64 ? qgpu_map_dma : NULL;
	case NV_ESC_RM_UNMAP_MEMORY_DMA:
		return size == NVOS47_BYTES_BEFORE_550 || size == sizeof(struct nvos47) ? qgpu_unmap_dma : NULL;
	case NV_ESC_RM_UPDATE_DEVICE_MAPPING_INFO:
		return size == sizeof(struct nvos56) ? qgpu_update_mapping : NULL;
	case NV_ESC_ALLOC_OS_EVENT:
	case NV_ESC_FREE_OS_EVENT:
		return size == sizeof(struct nv_os_event) ? qgpu_os_event : NULL;
	case NV_ESC_REGISTER_FD:
		return size == sizeof(u32) ? register_fd : NULL;
	}
	return NULL;
}

/*
 * Whether a call on a card's file is for a client of another pod. RM refuses it, unless a control file of that pod is
 * registered with this file. The client is the first member of every inspected struct.
 */
static bool is_foreign(const struct qgpu_call *call)
{
	u64 pod;

	if (call->nr == NV_ESC_REGISTER_FD || iminor(file_inode(call->file->filp)) == NV_MINOR_CONTROL)
		return false;
	pod = qgpu_client_pod(call->in.free.root);
	return pod && pod != call->pod->id;
}

/*
 * A wrapped call is copied once and issued again as the plain call inside it, so the call that runs is the call that
 * was checked. The driver allows one level of wrapping, and a size one byte above what an ioctl word can express; no RM
 * call is that long.
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
	*cmd = qgpu_escape_word(xfer.cmd, xfer.size);
	*arg = xfer.ptr;
	return 0;
}

/*
 * Under a limit the module refuses calls whose memory it cannot count: RM's own mappings take page tables of the card
 * (CUDA's mappings are UVM's). It always refuses a dma-buf: RM makes one from any client's memory, and the driver reads
 * that client's handle from user memory, where no seal covers it. These calls have no common place for an RM status.
 */
static bool is_refused(const struct qgpu_pod *pod, u32 nr)
{
	switch (qgpu_escape_refusal(nr)) {
	case QGPU_REFUSED_ALWAYS:
		return !READ_ONCE(pod->gone);
	case QGPU_REFUSED_UNDER_LIMIT:
		return qgpu_pod_limited(pod);
	case QGPU_NOT_REFUSED:
		break;
	}
	return false;
}

long qgpu_escape(struct qgpu_file *file, unsigned int cmd, unsigned long arg, qgpu_driver_ioctl_t driver)
{
	long (*handler)(struct qgpu_call *call);
	struct qgpu_call call;
	long ret = unwrap(&cmd, &arg);

	if (ret)
		return ret;
	/* RM would treat this file as the other one, whose clients would outlive the release that removes them here. */
	if (_IOC_NR(cmd) == NV_ESC_REGISTER_FD && iminor(file_inode(file->filp)) == NV_MINOR_CONTROL)
		return -EINVAL;
	if (is_refused(file->pod, _IOC_NR(cmd)))
		return -EOPNOTSUPP;
	handler = handler_of(_IOC_NR(cmd), _IOC_SIZE(cmd));
	if (!handler)
		return driver(file->filp, cmd, arg);
	call.file = file;
	call.driver = driver;
	call.pod = file->pod;
	call.user = (void __user *)arg;
	call.nr = _IOC_NR(cmd);
	call.size = _IOC_SIZE(cmd);
	call.owes = false;
	call.nr_exports = 0;
	call.exports = 0;
	call.params_at = 0;
	call.params_size = 0;
	call.params = NULL;
	if (copy_from_user(&call.in, call.user, call.size))
		return -EFAULT;
	memset(&call.out, 0xff, sizeof(call.out));	/* unless RM answers: not OK */
	call.sealed = true;
	if (is_foreign(&call))
		return -EPERM;
	if (down_killable(&call.pod->calls))
		return -EINTR;
	ret = handler(&call);
	up(&call.pod->calls);
	return ret;
}
