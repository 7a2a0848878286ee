/* SPDX-License-Identifier: GPL-2.0 */
#ifndef _QGPU_TOCTOU_H
#define _QGPU_TOCTOU_H

#include <linux/list.h>
#include <linux/types.h>

struct qgpu_pod;
struct task_struct;

/* One call of the current task: what was admitted, and room for RM's answer. */
struct qgpu_toctou {
	struct hlist_node node;
	struct task_struct *task;
	u32 nr, size;
	const void *in;
	void *out;
	u64 params_at;		/* where the admitted parameters begin in user memory */
	u32 params_size;	/* 0: none */
	void *params;		/* the parameters, overwritten by RM's answer */
	void *data;		/* the driver's kernel copy while RM works on it */
	struct qgpu_pod *pod;
	u32 nr_exports;		/* objects that the call puts into a file by a descriptor */
	u32 exports;		/* pGPUs of memory among them */
	u32 carried;		/* ... that were in such a file before */
	bool noted;		/* that file's release ends these exports */
	bool tampered;		/* this copy, or RM's copy of the parameters, was changed and has been restored */
	bool answered;		/* out holds RM's own answer */
	bool failed;		/* RM did not process the call: the status inside is the caller's */
};

void qgpu_toctou_init(void);
/* Under qgpu_attach_lock: seal from now on, if the driver's functions can be probed; until then. */
void qgpu_toctou_start(void);
void qgpu_toctou_stop(void);
/* Whether calls are sealed now. */
bool qgpu_toctou_sealed(void);
/* How many of RM's calls were not seen since the last time this was asked. */
unsigned long qgpu_toctou_missed(void);

/* The caller has filled in nr, size, in and out, and the parameters if there are any. */
void qgpu_toctou_begin(struct qgpu_toctou *seal);
void qgpu_toctou_end(struct qgpu_toctou *seal);

#endif
