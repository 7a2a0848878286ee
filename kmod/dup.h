/* SPDX-License-Identifier: GPL-2.0 */
#ifndef _QGPU_DUP_H
#define _QGPU_DUP_H

#include "call.h"

struct qgpu_client;
struct qgpu_mem;
struct qgpu_tsg;

/* An object that a call has given to a client under a second name. */
struct qgpu_arrival {
	struct qgpu_client *client;
	u32 parent, handle;
	u32 gpus;		/* the cards to charge; 0: that of the device above, found out here */
	u64 size;		/* likewise; before, that of the memory that was duplicated, if it is known */
	struct qgpu_mem *spare;	/* an empty charge, in case it is charged like new memory; made before RM is asked */
	int lies_on;		/* the card of what was duplicated; -1: unknown, as of an import */
	struct qgpu_tsg *tsg;	/* what the name that was duplicated stood for before RM was asked, or NULL */
	u64 stamp;		/* of that name */
	const struct nvos55 *dup;	/* the call, unless it is an import */
	struct qgpu_client *source;	/* whose object was duplicated; NULL: an import, or unknown */
};

/* A reference to the memory that it is, if known and charged to the pod; else NULL. */
typedef struct qgpu_mem *(*qgpu_finder)(const struct qgpu_arrival *arrival, void *about);

/* Book it, or take it back; then the RM status returned says why. */
u32 qgpu_arrive(struct qgpu_call *call, struct qgpu_arrival *arrival, qgpu_finder find, void *about);
long qgpu_dup(struct qgpu_call *call);
/* NV_ESC_RM_SHARE: RM would let anybody duplicate anybody's object. */
long qgpu_share(struct qgpu_call *call);

#endif
