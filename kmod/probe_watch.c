// SPDX-License-Identifier: GPL-2.0
/*
 * probe_watch.c - whether limits can be enforced. They hold only while every probe in the driver works: each is a way
 * past them when it is missing. So they are tried before a limit is granted, which is refused otherwise (pod.c), and
 * once a second. A change is told by an event and in the kernel's log, and marks the pods that have a limit.
 *
 * The same beat looks for cards that have come.
 */
#define pr_fmt(fmt) "qgpu: " fmt

#include <linux/mutex.h>
#include <linux/workqueue.h>

#include "events.h"
#include "gpu.h"
#include "pod.h"
#include "probe_watch.h"
#include "probes.h"
#include "rm.h"
#include "toctou.h"
#include "uvm.h"
#include "uvm_mem.h"

#define EACH		HZ
/* Probes that could not be placed are tried again this seldom: a failed try waits for the whole machine. Cards too. */
#define TRY_AGAIN	16

static DEFINE_MUTEX(told_lock);		/* protects told */
static u32 told;
static bool watching;			/* under qgpu_attach_lock */
static unsigned int beats;		/* of the watch */

static u32 look(void)
{
	u32 missing = 0;

	if (!qgpu_probes_try())
		missing |= QGPU_MISSING_PROBES;
	if (!qgpu_toctou_sealed())
		missing |= QGPU_MISSING_SEAL;
	if (!qgpu_uvm_mem_counted())
		missing |= QGPU_MISSING_HELD;
	if (qgpu_uvm_unbounded())
		missing |= QGPU_MISSING_MANAGED;
	return missing;
}

static void tell(u32 missing)
{
	lockdep_assert_held(&told_lock);
	if (missing)
		qgpu_pods_unchecked();
	if (missing == told)
		return;
	told = missing;
	qgpu_event(QGPU_EVENT_MISSING, 0, 0, missing);
	if (missing)
		pr_err_ratelimited("limits are not safe, and new ones are refused:%s%s%s%s\n",
				   missing & QGPU_MISSING_PROBES ? " probes are off;" : "",
				   missing & QGPU_MISSING_SEAL ? " calls are not sealed;" : "",
				   missing & QGPU_MISSING_HELD ? " memory that UVM holds is not counted;" : "",
				   missing & QGPU_MISSING_MANAGED ? " managed memory is not bounded;" : "");
	else
		pr_info_ratelimited("limits can be enforced\n");
}

u32 qgpu_probe_watch_check(void)
{
	u32 missing;

	mutex_lock(&told_lock);
	missing = READ_ONCE(watching) ? look() : 0;
	if (READ_ONCE(watching))
		tell(missing);
	mutex_unlock(&told_lock);
	return missing;
}

static void note_missed(void)
{
	unsigned long missed;

	mutex_lock(&told_lock);
	missed = qgpu_toctou_missed() + qgpu_uvm_missed() + qgpu_uvm_mem_missed();
	if (missed) {
		pr_warn_ratelimited("%lu calls into the driver were not seen by a probe\n", missed);
		qgpu_pods_unchecked();
	}
	mutex_unlock(&told_lock);
}

static void place(void)
{
	qgpu_toctou_start();
	qgpu_uvm_mem_start();
	qgpu_uvm_start();
}

static void beat(struct work_struct *work);
static DECLARE_DELAYED_WORK(watch, beat);

static void beat(struct work_struct *work)
{
	u32 missing = qgpu_probe_watch_check();

	note_missed();
	if (++beats % TRY_AGAIN == 0 && mutex_trylock(&qgpu_attach_lock)) {
		if (watching && missing)
			place();
		if (watching)
			qgpu_gpus_enumerate();
		mutex_unlock(&qgpu_attach_lock);
	}
	schedule_delayed_work(&watch, EACH);
}

void qgpu_probe_watch_start(void)
{
	lockdep_assert_held(&qgpu_attach_lock);
	place();
	WRITE_ONCE(watching, true);
	qgpu_probe_watch_check();
	schedule_delayed_work(&watch, EACH);
}

/* The work only tries to take qgpu_attach_lock, so it ends. */
void qgpu_probe_watch_stop(void)
{
	lockdep_assert_held(&qgpu_attach_lock);
	WRITE_ONCE(watching, false);
	cancel_delayed_work_sync(&watch);
	qgpu_uvm_stop();
	qgpu_uvm_mem_stop();
	qgpu_toctou_stop();
	mutex_lock(&told_lock);
	told = 0;
	mutex_unlock(&told_lock);
}
