/* SPDX-License-Identifier: GPL-2.0 */
#ifndef _QGPU_TOCTOU_H
#define _QGPU_TOCTOU_H

#include <linux/list.h>
#include <linux/types.h>

struct task_struct;

/* One call of the current task: what was admitted, and room for what RM made of it. */
struct qgpu_toctou {
	struct hlist_node node;
	struct task_struct *task;
	u32 nr, size;
	const void *in;
	void *out;
	u64 params_at;		/* where in user memory parameters begin that were admitted too */
	u32 params_size;	/* 0: none */
	void *params;		/* they, and in their place what RM answers there */
	void *data;		/* the driver's kernel copy while RM works on it */
	bool tampered;		/* it, or RM's copy of the parameters, differed from what was admitted, and was put right */
	bool answered;		/* out holds RM's own answer */
	bool failed;		/* ... to a call that RM did not look into: the status inside is the caller's */
};

void qgpu_toctou_init(void);
void qgpu_toctou_uninit(void);
bool qgpu_toctou_sealed(void);

/* What the caller has filled in of it is nr, size, in and out, and what there is of parameters. */
void qgpu_toctou_begin(struct qgpu_toctou *seal);
void qgpu_toctou_end(struct qgpu_toctou *seal);

#endif
