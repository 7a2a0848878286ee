/* SPDX-License-Identifier: GPL-2.0 */
#ifndef _QGPU_CALL_H
#define _QGPU_CALL_H

#include <linux/ioctl.h>

#include "file.h"
#include "nvrm.h"
#include "pod.h"

/* The driver's own ioctl, for a caller that is inside a wrapper of interpose.c. */
typedef long (*qgpu_driver_ioctl_t)(struct file *filp, unsigned int cmd, unsigned long arg);

static inline unsigned int qgpu_escape_word(u32 nr, u32 size)
{
	return _IOC(_IOC_READ | _IOC_WRITE, 'F', nr, size);
}

/* One call of a pod that is looked into: the struct as it came, and as RM answered it. */
struct qgpu_call {
	struct qgpu_file *file;
	struct qgpu_pod *pod;
	qgpu_driver_ioctl_t driver;
	void __user *user;
	u32 nr, size;
	bool sealed;		/* out is RM's own answer, not what user memory says */
	bool failed;		/* ... to a call that RM did not look into */
	u64 params_at;		/* in user memory */
	u32 params_size;
	void *params;		/* as they were looked at, which RM acts on; then, if sealed, as RM answered them */
	u8 room[NV_PARAMS_LOOKED_AT];
	union {
		struct nvos00 free;
		struct nvos02_fd memory;
		struct nvos05 object;
		struct nvos21 alloc;	/* the members up to params are those of the long form too */
		struct nvos64 alloc_long;
		struct nvos32 heap;
		struct nvos54 control;
		struct nvos55 dup;
	} in, out;
};

/* Look at what a pointer of the call points to; what is not there is 0, for RM too. */
void qgpu_call_look(struct qgpu_call *call, u64 params_at, void *params, u32 size);

/*
 * Whether the parameters that were looked at name a client that is neither the pod's nor the call's own. words: which of
 * their 32-bit words are handles of clients, a bit each.
 */
bool qgpu_call_names_foreign(const struct qgpu_call *call, u32 own, u8 words);

/*
 * Hand the call to the driver. Whatever is returned, call->out is what RM answered, with a status that is not OK if it
 * did not: a struct that the driver cannot write back makes -EFAULT of a call that is done all the same.
 */
long qgpu_call_forward(struct qgpu_call *call);
/* The same while a gate is open that is to be closed: waits for no user memory. */
long qgpu_call_forward_open(struct qgpu_call *call);
/*
 * What is left to do with user memory once the gate is closed again. False: RM was not asked, for all that is known:
 * call anew.
 */
bool qgpu_call_deliver(struct qgpu_call *call, long *ret);
#define QGPU_CALL_TRIES	3	/* of a call whose pages go away each time */
/* Answer with an RM status instead of the driver's. */
long qgpu_call_answer(struct qgpu_call *call, size_t status_at, u32 status);

#endif
