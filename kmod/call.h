/* SPDX-License-Identifier: GPL-2.0 */
#ifndef _QGPU_CALL_H
#define _QGPU_CALL_H

#include <linux/ioctl.h>

#include "driver_file.h"
#include "nvrm.h"
#include "pod.h"

/* The driver's own ioctl, for a caller inside a wrapper of interpose.c. */
typedef long (*qgpu_driver_ioctl_t)(struct file *filp, unsigned int cmd, unsigned long arg);

static inline unsigned int qgpu_escape_word(u32 nr, u32 size)
{
	return _IOC(_IOC_READ | _IOC_WRITE, 'F', nr, size);
}

/* One inspected call of a pod: the struct as it came in, and as RM answered it. */
struct qgpu_call {
	struct qgpu_file *file;
	struct qgpu_pod *pod;
	qgpu_driver_ioctl_t driver;
	void __user *user;
	u32 nr, size;
	bool sealed;		/* out is RM's own answer, not the content of user memory */
	bool failed;		/* RM refused the call without processing it; but see alloc.c */
	bool owes;		/* not made yet, or not in full: the pod has to pay first, without locks */
	u32 nr_exports;		/* objects that it puts into a file by a descriptor */
	u32 exports;		/* pGPUs of memory among them */
	bool noted;		/* that file's release ends these exports */
	u32 carried;		/* ... that was in the file which it names by one, as far as it is known */
	u64 params_at;		/* in user memory */
	u32 params_size;
	void *params;		/* the checked copy that RM acts on; if sealed, afterwards RM's answer */
	u8 room[NV_PARAMS_LOOKED_AT];
	union {
		struct nvos00 free;
		struct nvos02_fd memory;
		struct nvos05 object;
		struct nvos21 alloc;	/* the members up to params are those of the long form too */
		struct nvos64 alloc_long;
		struct nvos32 heap;
		struct nvos33_fd map;
		struct nvos34 unmap;
		struct nvos46 map_dma;
		struct nvos47 unmap_dma;
		struct nvos54 control;
		struct nvos55 dup;
		struct nvos56 remap;
		struct nvos57 share;
		struct nv_os_event os_event;
		u32 ctl_fd;	/* NV_ESC_REGISTER_FD */
	} in, out;
};

/* Copy what a pointer of the call points to. What cannot be read is 0, for RM too. */
void qgpu_call_look(struct qgpu_call *call, u64 params_at, void *params, u32 size);

/*
 * Whether the copied parameters name another client than the call's own, which RM looks at. Programs name no other. One
 * of the pod's could end, and its handle become another pod's, before RM acts. words: a bit for each 32-bit word that
 * is a client handle.
 */
bool qgpu_call_names_foreign(const struct qgpu_call *call, u32 own, u8 words);

/*
 * Hand the call to the driver. Whatever the return value, call->out is RM's answer, with a status other than NV_OK if
 * RM did not answer. If the driver cannot write the struct back, it returns -EFAULT although the call is done.
 */
long qgpu_call_forward(struct qgpu_call *call);
/* The same while a gate is open that should be closed: does not wait for user memory. */
long qgpu_call_forward_open(struct qgpu_call *call);
/* Have the pages of a call's struct and of its parameters present and writable, if they can be. */
void qgpu_call_fault_in(const struct qgpu_call *call, u64 params_at);
/*
 * Finish the accesses to user memory after the gate is closed again. False: as far as is known RM was not asked, so
 * repeat the call.
 */
bool qgpu_call_deliver(struct qgpu_call *call, long *ret);
#define QGPU_CALL_TRIES	3	/* of a call whose pages are evicted each time */
/* As qgpu_gate_penalty_begin(), but what the pod owes is noted, for: */
long qgpu_call_begin(struct qgpu_call *call);
/* Pay what the pod owes; true: make the call again. The caller holds no lock, because paying takes long. */
bool qgpu_call_pay(struct qgpu_call *call, long *ret);
/* Answer with an RM status instead of the driver's. */
long qgpu_call_answer(struct qgpu_call *call, size_t status_at, u32 status);

#endif
