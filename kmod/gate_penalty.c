// SPDX-License-Identifier: GPL-2.0
/*
 * gate_penalty.c - the price of kernels that run out of turn. Some calls need a closed gate to stay open while they
 * last. Each such call delays the pod's next one by many times its own length. So a loop of such calls gains nothing,
 * and neither do many threads or processes. Only the next call waits; a process that exits does not.
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
