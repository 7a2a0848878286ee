/* SPDX-License-Identifier: GPL-2.0 */
#ifndef _QGPU_ESCAPE_H
#define _QGPU_ESCAPE_H

#include "file.h"
#include "nvrm.h"
#include "pod.h"

struct qgpu_client;

/* One call of a pod that is looked into: the struct as it came, and as RM answered it. */
struct qgpu_call {
	struct qgpu_file *file;
	struct qgpu_pod *pod;
	void __user *user;
	u32 nr, size;
	bool sealed;		/* out is RM's own answer, not what user memory says */
	bool failed;		/* ... to a call that RM did not look into */
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

/* A pod's ioctl on a file of the driver. */
long qgpu_escape(struct qgpu_file *file, unsigned int cmd, unsigned long arg);

/*
 * Hand the call to the driver. Whatever is returned, call->out is what RM answered, with a status that is not OK if it
 * did not: a struct that the driver cannot write back makes -EFAULT of a call that is done all the same.
 */
long qgpu_call_forward(struct qgpu_call *call);
/* The same while a gate is open that is to be closed: waits for no user memory. */
long qgpu_call_forward_open(struct qgpu_call *call);
/* What is left to do with user memory once the gate is closed again. False: RM was not asked, for all that is known: call anew. */
bool qgpu_call_deliver(struct qgpu_call *call, long *ret);
/* Answer with an RM status instead of the driver's. */
long qgpu_call_answer(struct qgpu_call *call, size_t status_at, u32 status);

/* A call that asks for video memory; where the object's handle and RM's status stand differs by form. */
struct qgpu_video {
	u32 root, parent;
	u64 size;		/* may be a lie; then RM's answer decides */
	size_t handle_at, status_at;
};

/* Reserve, call, book. */
long qgpu_video_alloc(struct qgpu_call *call, const struct qgpu_video *video);
bool qgpu_is_physical(u32 class);
long qgpu_refuse_class(struct qgpu_call *call, size_t status_at);

/* A call that frees an object, and by its form where RM's status stands. */
struct qgpu_freeing {
	u32 root, handle;
	size_t status_at;
};

long qgpu_free(struct qgpu_call *call, const struct qgpu_freeing *freeing);

/* The classes that the register keeps beside clients and memory. */
bool qgpu_is_registered(u32 class);
long qgpu_alloc(struct qgpu_call *call);
void qgpu_free_unsaid(struct qgpu_client *client, u32 parent, u32 handle);
long qgpu_alloc_memory(struct qgpu_call *call);
long qgpu_dup(struct qgpu_call *call);
long qgpu_vid_heap(struct qgpu_call *call);
long qgpu_control(struct qgpu_call *call);

#endif
