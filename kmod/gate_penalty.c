// SPDX-License-Identifier: GPL-2.0
/*
 * gate_penalty.c - the price of kernels that run out of turn. Some calls need a closed gate to stay open while they
 * last. Each such call delays the pod's next one by many times its own length. So a loop of such calls gains nothing,
 * and neither do many threads or processes. Only the next call waits; a process that exits does not. If its end keeps
 * the gate of other processes open, because they have handles on the same TSG, the pod's next call waits for that too.
 */
#include <linux/ktime.h>
#include <linux/sched.h>
#include <linux/sched/signal.h>

#include "gate_penalty.h"
#include "pod.h"

#define TIMES	20
#define MAX_NS	NSEC_PER_SEC

void qgpu_gate_penalty_owe(struct qgpu_pod *pod, u64 open_ns)
{
	u64 now_ns = ktime_get_ns();

	spin_lock(&pod->owed_lock);
	pod->penalty_until_ns = max(pod->penalty_until_ns, now_ns) + min_t(u64, open_ns * TIMES, MAX_NS);
	spin_unlock(&pod->owed_lock);
}

static u64 penalty_until_ns(struct qgpu_pod *pod)
{
	u64 until_ns;

	spin_lock(&pod->owed_lock);
	until_ns = pod->penalty_until_ns;
	spin_unlock(&pod->owed_lock);
	return until_ns;
}

int qgpu_gate_penalty_begin(struct qgpu_pod *pod)
{
	u64 now_ns, until_ns;

	if (mutex_lock_killable(&pod->penalty_lock))
		return -EINTR;
	while ((now_ns = ktime_get_ns()) < (until_ns = penalty_until_ns(pod))) {
		schedule_timeout_killable(nsecs_to_jiffies(until_ns - now_ns) + 1);
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
	lockdep_assert_held(&pod->penalty_lock);
	if (opened)
		qgpu_gate_penalty_owe(pod, ktime_get_ns() - pod->open_since_ns);
	mutex_unlock(&pod->penalty_lock);
}
