// SPDX-License-Identifier: GPL-2.0
/*
 * debt.c - what a pod owes for its kernels having run out of turn. Some calls need a closed gate open for as long as
 * they last; each costs the pod many times that before the next one begins, so neither a loop of such calls nor many
 * threads or processes of them gain anything. Nobody pays who does not call again: an exit waits for nothing here.
 */
#include <linux/ktime.h>
#include <linux/sched.h>
#include <linux/sched/signal.h>

#include "debt.h"
#include "pod.h"

#define TIMES	20
#define MAX_NS	NSEC_PER_SEC

int qgpu_debt_begin(struct qgpu_pod *pod)
{
	u64 now_ns;

	if (mutex_lock_killable(&pod->debt_lock))
		return -EINTR;
	while ((now_ns = ktime_get_ns()) < pod->owed_until_ns) {
		schedule_timeout_killable(nsecs_to_jiffies(pod->owed_until_ns - now_ns) + 1);
		if (fatal_signal_pending(current)) {
			mutex_unlock(&pod->debt_lock);
			return -EINTR;
		}
	}
	pod->open_since_ns = now_ns;
	return 0;
}

void qgpu_debt_end(struct qgpu_pod *pod, bool opened)
{
	u64 now_ns = ktime_get_ns();

	lockdep_assert_held(&pod->debt_lock);
	if (opened)
		pod->owed_until_ns = now_ns + min_t(u64, (now_ns - pod->open_since_ns) * TIMES, MAX_NS);
	mutex_unlock(&pod->debt_lock);
}
