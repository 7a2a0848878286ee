/* SPDX-License-Identifier: GPL-2.0 */
#ifndef _QGPU_RULE_LOOKUP_H
#define _QGPU_RULE_LOOKUP_H

#include <linux/types.h>

/* What becomes of a control that has a row. */
enum qgpu_control_action {
	QGPU_CONTROL_SCHEDULES,		/* refused: scheduling is a right that a pod lacks */
	QGPU_CONTROL_PASS,
	/* these have a handler in control.c or export.c */
	QGPU_CONTROL_TIMESLICE,
	QGPU_CONTROL_PREEMPTION_MODE,
	QGPU_CONTROL_PREEMPT,
	QGPU_CONTROL_START_CHANNELS,
	QGPU_CONTROL_FB_INFO,
	QGPU_CONTROL_EXPORT,
	QGPU_CONTROL_IMPORT,
	QGPU_CONTROL_FIRMWARE,
};

struct qgpu_control_rule {
	u32 number;
	enum qgpu_control_action action;
	u8 memory_at;		/* of an export: where the handle of the memory lies; 0: it names many */
	u8 clients;		/* which 32-bit words of the parameters are handles of clients, a bit each */
	u8 clients_size;	/* ... in parameters of this many bytes; 0: of any */
};

#define QGPU_BY_ALLOC		0x1	/* made by RM_ALLOC and RM_ALLOC_OBJECT */
#define QGPU_BY_ALLOC_MEMORY	0x2	/* made by RM_ALLOC_MEMORY */
#define QGPU_ON_COMPUTE_ENGINE	0x4	/* makes its channel run on the compute engine */
#define QGPU_HOLDS_MEMORY	0x8	/* RM keeps memory that the parameters name for as long as it lives */

struct qgpu_class_rule {
	u32 number;
	u8 flags;
	u8 clients;		/* as above */
};

enum qgpu_escape_refusal {
	QGPU_NOT_REFUSED,
	QGPU_REFUSED_ALWAYS,
	QGPU_REFUSED_UNDER_LIMIT,	/* of a pod with a memory limit */
};

struct qgpu_escape_rule {
	u32 nr;
	enum qgpu_escape_refusal refusal;
};

/* NULL: a pod may not ask for it. */
const struct qgpu_control_rule *qgpu_control_rule(u32 cmd);
const struct qgpu_class_rule *qgpu_class_rule(u32 class);
enum qgpu_escape_refusal qgpu_escape_refusal(u32 nr);

#endif
