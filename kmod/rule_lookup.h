/* SPDX-License-Identifier: GPL-2.0 */
#ifndef _QGPU_RULE_LOOKUP_H
#define _QGPU_RULE_LOOKUP_H

#include <linux/types.h>

/* What the module does with a control that has a row. */
enum qgpu_control_action {
	QGPU_CONTROL_SCHEDULES,		/* refused: pods have no permission to schedule */
	QGPU_CONTROL_PASS,
	/* these have a handler in control.c or export.c */
	QGPU_CONTROL_TIMESLICE,
	QGPU_CONTROL_PREEMPTION_MODE,
	QGPU_CONTROL_SHARE_POLICY,
	QGPU_CONTROL_BIND,
	QGPU_CONTROL_PREEMPT,
	QGPU_CONTROL_PAID,
	QGPU_CONTROL_PIDS_BY_NAMESPACE,
	QGPU_CONTROL_START_CHANNELS,
	QGPU_CONTROL_FB_INFO,
	QGPU_CONTROL_EXPORT,
	QGPU_CONTROL_IMPORT,
	QGPU_CONTROL_FIRMWARE,
};

struct qgpu_control_rule {
	u32 number;
	enum qgpu_control_action action;
	u8 memory_at;		/* for an export: offset of the memory's handle; 0: it names several */
	u8 clients;		/* a bit for each 32-bit word of the parameters that is a client handle */
	u8 clients_size;	/* ... if the parameters have this many bytes; 0: any size */
};

#define QGPU_BY_ALLOC		0x1	/* a pod may make it by RM_ALLOC and RM_ALLOC_OBJECT */
#define QGPU_BY_ALLOC_MEMORY	0x2	/* a pod may make it by RM_ALLOC_MEMORY */
#define QGPU_ON_COMPUTE_ENGINE	0x4	/* makes its channel run on the compute engine */
#define QGPU_HOLDS_MEMORY	0x8	/* RM keeps the memory that the parameters name until the object is freed */

struct qgpu_class_rule {
	u32 number;
	u8 flags;
	u8 clients;		/* as above */
	u8 memory_at;		/* for a further handle of memory: offset of the memory's handle; 0: it is none */
};

enum qgpu_escape_refusal {
	QGPU_NOT_REFUSED,
	QGPU_REFUSED_ALWAYS,
	QGPU_REFUSED_UNDER_LIMIT,	/* for a pod with a memory limit */
};

struct qgpu_escape_rule {
	u32 nr;
	enum qgpu_escape_refusal refusal;
};

/* NULL: there is no row, so the pod is refused. */
const struct qgpu_control_rule *qgpu_control_rule(u32 cmd);
const struct qgpu_class_rule *qgpu_class_rule(u32 class);
enum qgpu_escape_refusal qgpu_escape_refusal(u32 nr);
/* Whether TSGs and lone channels of pods may be for it. */
bool qgpu_engine_allowed(u32 engine);

#endif
