// SPDX-License-Identifier: GPL-2.0
/*
 * gate_penalty.c - what a pod pays for kernels that ran out of turn. Some calls need a closed gate open for as long as
 * they last; each costs the pod many times that before the next one begins, so neither a loop of such calls nor many
 * threads or processes of them gain anything. Nobody pays who does not call again: an exit waits for nothing here.
 */
#include <linux/ktime.h>
#include <linux/sched.h>
#include <linux/sched/signal.h>

#include "gate_penalty.h"
#include "pod.h"

#define TIMES	20
#define MAX_NS	NSEC_PER_SEC

int qgpu_gate_penalty_begin(struct qgpu_pod *pod)
{
	u64 now_ns;

	if (mutex_lock_killable(&pod->penalty_lock))
		return -EINTR;
	while ((now_ns = ktime_get_ns()) < pod->penalty_until_ns) {
		schedule_timeout_killable(nsecs_to_jiffies(pod->penalty_until_ns - now_ns) + 1);
		if (fatal_signal_pending(current)) {
			mutex_unlock(&pod->penalty_lock);
			return -EINTR;
		}
	}
	pod->open_since_ns = now_ns;
	return 0;
}

void qgpu_gate_penalty_end(struct qgpu_pod *pod, bool opened)
{
	u64 now_ns = ktime_get_ns();

	lockdep_assert_held(&pod->penalty_lock);
	if (opened)
		pod->penalty_until_ns = now_ns + min_t(u64, (now_ns - pod->open_since_ns) * TIMES, MAX_NS);
	mutex_unlock(&pod->penalty_lock);
}
