/* SPDX-License-Identifier: GPL-2.0 */
#ifndef _QGPU_PROBES_H
#define _QGPU_PROBES_H

#include <linux/kprobes.h>

/* A function of the driver, and what runs when it is called. Handlers run with preemption off and must not sleep. */
struct qgpu_probe {
	const char *symbol;		/* module:function */
	kprobe_pre_handler_t called;	/* NULL: entered and returned are given instead */
	bool redirects;			/* called may send the call to another function, and then returns 1 */
	kretprobe_handler_t entered;	/* 1: the return is not to be watched */
	kretprobe_handler_t returned;
	size_t data_size;		/* what entered and returned share of a call */
	int at_once;			/* calls whose return is watched at the same time; more are missed */
	struct kprobe at_call;
	struct kretprobe at_return;
};

/* Probes that are of use only together. */
struct qgpu_probes {
	const char *what;		/* they do, for the log */
	struct qgpu_probe *probes;
	int nr;
	bool placed;
	int error;			/* of the last try to place them, already told */
	unsigned long missed;		/* calls that passed unseen */
};

/* A task that this module has call a function whose probe sends others to this module: the handler lets it through. */
struct qgpu_pass {
	struct hlist_node node;
	const struct task_struct *task;
	const void *key;		/* which functions */
};

void qgpu_pass_begin(struct qgpu_pass *pass, const void *key);
void qgpu_pass_end(struct qgpu_pass *pass);
/* That of the current task, or NULL. */
struct qgpu_pass *qgpu_pass_of(const void *key);
static inline bool qgpu_passes(const void *key)
{
	return qgpu_pass_of(key);
}

/* A kernel without probes is no reason not to load; probe_watch.c refuses limits there. */
void qgpu_probes_init(void);
void qgpu_probes_uninit(void);

/* Place all, in order, or none. */
int qgpu_probes_place(struct qgpu_probes *set);
/* When it returns, no handler runs, and whoever was redirected has reached the function that it was sent to. */
void qgpu_probes_remove(struct qgpu_probes *set);

/* Try whether this kernel's probes fire and redirect at all. Sleeps. */
bool qgpu_probes_try(void);
/* Whether they are placed, and the last try was good. Cheap. */
bool qgpu_probes_work(const struct qgpu_probes *set);
/* How many calls have passed unseen since the last time this was asked. */
unsigned long qgpu_probes_missed(struct qgpu_probes *set);

#endif
