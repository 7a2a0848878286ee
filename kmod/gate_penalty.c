// SPDX-License-Identifier: GPL-2.0
/*
 * gate_penalty.c - the price of kernels that run out of turn. Some calls need a closed gate to stay open while they
 * last. Each such call delays the pod's next one by many times its own length. So a loop of such calls gains nothing,
 * and neither do many threads or processes. Only the next call waits; a process that exits does not. If its end keeps
 * the gate of other processes open, because they have handles on the same TSG, the pod's next call waits for that too.
 *
 * A call or an end that RM prolongs costs no more than its maximum. But a pod can prolong both, by the number of its
 * objects and by threads of SCHED_IDLE beside busy ones. So whatever the maximum, either costs LEAST_TIMES its length.
 * The end of a process whose gates nobody shares costs only as if it were as long as the process waited for a CPU;
 * that includes the time in which its cgroup had used up its CPU quota.
 */
#include <linux/ktime.h>
#include <linux/sched.h>
#include <linux/sched/signal.h>

#include "gate_penalty.h"
#include "gpu.h"
#include "pod.h"

#define TIMES		20
#define LEAST_TIMES	5
#define CALL_MAX_NS	NSEC_PER_SEC
#define EXIT_MAX_NS	(60 * NSEC_PER_SEC)

static void owe(struct qgpu_pod *pod, u64 open_ns, u64 max_ns)
{
	u64 now_ns = ktime_get_ns(), from_ns = max(pod->penalty_until_ns, now_ns);

	lockdep_assert_held(&pod->owed_lock);
	pod->penalty_until_ns = max(min(from_ns + open_ns * TIMES, now_ns + max_ns), from_ns + open_ns * LEAST_TIMES);
}

void qgpu_gate_penalty_exit(struct qgpu_pod *pod, u64 gated_ns, bool shared, u64 starved_ns)
{
	u64 now_ns = qgpu_gated_ns(pod), *billed_ns = &pod->billed_ns[shared], since_ns;

	if (!shared)
		gated_ns = max(gated_ns, now_ns - min(now_ns, starved_ns));
	spin_lock(&pod->owed_lock);
	since_ns = max(gated_ns, *billed_ns);	/* processes that end at the same time cost no more than one */
	if (now_ns > since_ns) {
		owe(pod, now_ns - since_ns, shared ? EXIT_MAX_NS : 0);
		*billed_ns = now_ns;
	}
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

int qgpu_gate_penalty_pay(struct qgpu_pod *pod)
{
	u64 now_ns, until_ns;

	while ((now_ns = ktime_get_ns()) < (until_ns = penalty_until_ns(pod))) {
		schedule_timeout_killable(nsecs_to_jiffies(until_ns - now_ns) + 1);
		if (fatal_signal_pending(current))
			return -EINTR;
	}
	return 0;
}

int qgpu_gate_penalty_begin(struct qgpu_pod *pod)
{
	if (mutex_lock_killable(&pod->penalty_lock))
		return -EINTR;
	pod->open_since_ns = ktime_get_ns();
	if (pod->open_since_ns < penalty_until_ns(pod)) {
		mutex_unlock(&pod->penalty_lock);
		return -EAGAIN;
	}
	pod->gated_since_ns = qgpu_gated_ns(pod);
	return 0;
}

int qgpu_gate_penalty_pay_and_begin(struct qgpu_pod *pod)
{
	int ret;

	do {
		ret = qgpu_gate_penalty_pay(pod) ?: qgpu_gate_penalty_begin(pod);
	} while (ret == -EAGAIN);
	return ret;
}

void qgpu_gate_penalty_end(struct qgpu_pod *pod, enum qgpu_gates gates)
{
	u64 open_ns = 0;

	lockdep_assert_held(&pod->penalty_lock);
	if (gates == QGPU_GATES_HELD)
		open_ns = qgpu_gated_ns(pod) - pod->gated_since_ns;
	else if (gates != QGPU_GATES_UNTOUCHED)
		open_ns = ktime_get_ns() - pod->open_since_ns;
	if (gates == QGPU_GATES_OPENED_TWICE)
		open_ns *= 2;
	spin_lock(&pod->owed_lock);
	if (open_ns)
		owe(pod, open_ns, CALL_MAX_NS);
	spin_unlock(&pod->owed_lock);
	mutex_unlock(&pod->penalty_lock);
}
