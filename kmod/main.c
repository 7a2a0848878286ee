// SPDX-License-Identifier: GPL-2.0
/*
 * main.c - the life of the module. What user space can reach comes last and goes first.
 */
#include <linux/module.h>
#include <linux/suspend.h>

#include "cdev.h"
#include "client.h"
#include "interpose.h"
#include "pod.h"
#include "slice.h"

#define CREATE_TRACE_POINTS
#include "trace.h"

/* Calls from the kernel do not wait for the driver's own suspend lock, so none is made while it may be taken. */
static int pm_event(struct notifier_block *nb, unsigned long event, void *data)
{
	switch (event) {
	case PM_SUSPEND_PREPARE:
	case PM_HIBERNATION_PREPARE:
	case PM_RESTORE_PREPARE:
		qgpu_slice_pause(QGPU_PAUSE_SUSPEND);
		break;
	case PM_POST_SUSPEND:
	case PM_POST_HIBERNATION:
	case PM_POST_RESTORE:
		qgpu_slice_resume(QGPU_PAUSE_SUSPEND);
		break;
	}
	return NOTIFY_OK;
}

static struct notifier_block pm_notifier = { .notifier_call = pm_event };

static int __init qgpu_init(void)
{
	int ret = qgpu_clients_init();

	if (ret)
		return ret;
	qgpu_slice_init();
	ret = qgpu_interpose_init();
	if (ret)
		goto err_clients;
	ret = register_pm_notifier(&pm_notifier);
	if (ret)
		goto err_interpose;
	ret = qgpu_cdev_init();
	if (ret)
		goto err_pm;
	return 0;
err_pm:
	unregister_pm_notifier(&pm_notifier);
err_interpose:
	qgpu_interpose_uninit();
	qgpu_slice_uninit();
err_clients:
	qgpu_clients_uninit();
	return ret;
}

static void __exit qgpu_exit(void)
{
	qgpu_cdev_uninit();
	unregister_pm_notifier(&pm_notifier);
	qgpu_interpose_uninit();
	qgpu_slice_uninit();
	qgpu_pod_uninit();
	qgpu_clients_uninit();
}

module_init(qgpu_init);
module_exit(qgpu_exit);
MODULE_LICENSE("GPL");
MODULE_DESCRIPTION("Several pods share one NVIDIA GPU by policy");
MODULE_VERSION("0.1.0");
