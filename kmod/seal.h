/* SPDX-License-Identifier: GPL-2.0 */
#ifndef _QGPU_SEAL_H
#define _QGPU_SEAL_H

#include <linux/list.h>
#include <linux/types.h>

struct module;
struct task_struct;

/* One call of the current task: what was admitted, and room for what RM made of it. */
struct qgpu_seal {
	struct hlist_node node;
	struct task_struct *task;
	u32 nr, size;
	const void *in;
	void *out;
	void *data;		/* the driver's kernel copy while RM works on it */
	bool tampered;		/* it differed from in when RM was called, and was put right */
	bool answered;		/* out holds RM's own answer */
	bool failed;		/* ... to a call that RM did not look into: the status inside is the caller's */
};

void qgpu_seal_init(struct module *nvidia);
void qgpu_seal_uninit(void);
bool qgpu_sealed(void);

void qgpu_seal_begin(struct qgpu_seal *seal, u32 nr, const void *in, void *out, u32 size);
void qgpu_seal_end(struct qgpu_seal *seal);

#endif
