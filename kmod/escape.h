/* SPDX-License-Identifier: GPL-2.0 */
#ifndef _QGPU_ESCAPE_H
#define _QGPU_ESCAPE_H

#include "file.h"
#include "nvrm.h"
#include "pod.h"

struct qgpu_client;
struct qgpu_mem;
struct qgpu_object;

/* One call of a pod that is looked into: the struct as it came, and as RM answered it. */
struct qgpu_call {
	struct qgpu_file *file;
	struct qgpu_pod *pod;
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

/* A pod's ioctl on a file of the driver. */
long qgpu_escape(struct qgpu_file *file, unsigned int cmd, unsigned long arg);

/* Look at what a pointer of the call points to; what is not there is 0, for RM too. */
void qgpu_call_look(struct qgpu_call *call, u64 params_at, void *params, u32 size);

/* Whether the parameters that were looked at name a client that is neither the pod's nor the call's own; words: a bit each. */
bool qgpu_call_names_foreign(const struct qgpu_call *call, u32 own, u8 words);

/*
 * Hand the call to the driver. Whatever is returned, call->out is what RM answered, with a status that is not OK if it
 * did not: a struct that the driver cannot write back makes -EFAULT of a call that is done all the same.
 */
long qgpu_call_forward(struct qgpu_call *call);
/* The same while a gate is open that is to be closed: waits for no user memory. */
long qgpu_call_forward_open(struct qgpu_call *call);
/* What is left to do with user memory once the gate is closed again. False: RM was not asked, for all that is known: call anew. */
bool qgpu_call_deliver(struct qgpu_call *call, long *ret);
#define QGPU_CALL_TRIES	3	/* of a call whose pages go away each time */
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
/* Whether address space of these flags comes with its page tables, which lie on the card: gpu_vaspace.c:gvaspaceAlloc. */
bool qgpu_takes_tables(u32 flags);
/* Whether memory is asked for at an address of the card: RM then takes what its alignment spans besides. */
bool qgpu_chooses_place(u32 flags);
/* Refuse an allocation, and count that. */
long qgpu_refuse_alloc(struct qgpu_call *call, size_t status_at, u32 status);
long qgpu_refuse_memory(struct qgpu_call *call, int gpu, u64 size, size_t status_at);
/* Free memory that RM made and the pod may not have. Where UVM has mapped it already mem is what stays charged for it. */
void qgpu_take_back(struct qgpu_client *client, u32 parent, u32 handle, struct qgpu_mem *mem);

/* A call that frees an object, and by its form where RM's status stands. */
struct qgpu_freeing {
	u32 root, handle;
	size_t status_at;
};

long qgpu_free(struct qgpu_call *call, const struct qgpu_freeing *freeing);

/*
 * Charge what RM takes of the card for an object that is about to be made, and that has no handle; NULL: nothing. As
 * long as it is not known on which card a device is, it is on each that has a limit.
 */
struct qgpu_mem *qgpu_reserve_taken(struct qgpu_client *client, u32 parent, u32 class, u32 engine);
void qgpu_device_learned(struct qgpu_object *device);
/* Whether a channel is in a TSG that is charged and counted as one for compute. */
bool qgpu_is_in_compute_tsg(struct qgpu_client *client, u32 channel);
/* A channel has compute now: let it be preempted at any instruction, whether its program asks for that or not. */
void qgpu_make_preemptible(struct qgpu_client *client, u32 channel);
/* Give the object of a TSG or channel the TSG that it is or is in; nothing for another. -ENODEV: its card is not known. */
int qgpu_enter_tsg(struct qgpu_client *client, struct qgpu_object *object, u32 engine);

/* The classes that the register keeps beside clients and memory. */
bool qgpu_is_registered(u32 class);
long qgpu_alloc(struct qgpu_call *call);
/* Of a call that RM said no to: its handle is free, or had its object before; else what it made goes again. */
void qgpu_free_unsaid(struct qgpu_client *client, u32 parent, u32 handle, struct qgpu_mem *mem);
long qgpu_alloc_memory(struct qgpu_call *call);

/* An object that a call has given a client under a second name. */
struct qgpu_arrival {
	struct qgpu_client *client;
	u32 parent, handle;
	int gpu;		/* found out, as is its size */
	u64 size;
};

/* A reference to the memory that it is known to be, for which its pod is charged; or NULL. */
typedef struct qgpu_mem *(*qgpu_finder)(const struct qgpu_arrival *arrival, const void *about);

/* Book it, or take it back; then a status of RM's says why. */
u32 qgpu_arrive(struct qgpu_call *call, struct qgpu_arrival *arrival, qgpu_finder find, const void *about);
long qgpu_dup(struct qgpu_call *call);
/* memory_at: where in the parameters the handle of the memory lies; 0: they name many. */
long qgpu_export(struct qgpu_call *call, u32 memory_at);
long qgpu_import(struct qgpu_call *call);
long qgpu_vid_heap(struct qgpu_call *call);
long qgpu_control(struct qgpu_call *call);

#endif
