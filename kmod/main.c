// SPDX-License-Identifier: GPL-2.0
/* main.c - loads and unloads the module. The parts that user space can reach come last and go first. */
#define pr_fmt(fmt) "qgpu: " fmt

#include <linux/module.h>

#include "attach.h"
#include "cdev.h"
#include "client.h"
#include "compat.h"
#include "probes.h"
#include "pause.h"
#include "pod.h"
#include "plan_runner.h"
#include "toctou.h"
#include "uvm.h"

#define CREATE_TRACE_POINTS
#include "trace.h"

static int __init qgpu_init(void)
{
	const char *unfit = qgpu_kernel_unfit();
	int ret;

	if (unfit) {
		pr_err("not on this kernel: %s\n", unfit);
		return -EOPNOTSUPP;
	}
	ret = qgpu_clients_init();
	if (ret)
		return ret;
	ret = qgpu_uvm_init();
	if (ret)
		goto err_clients;
	qgpu_toctou_init();
	qgpu_probes_init();
	qgpu_runner_init();
	ret = qgpu_attach_init();
	if (ret)
		goto err_probes;
	ret = qgpu_pause_init();
	if (ret)
		goto err_attach;
	ret = qgpu_cdev_init();
	if (ret)
		goto err_pause;
	return 0;
err_pause:
	qgpu_pause_uninit();
err_attach:
	qgpu_attach_uninit();
	qgpu_gpus_uninit();
err_probes:
	qgpu_probes_uninit();
	qgpu_uvm_uninit();
err_clients:
	qgpu_clients_uninit();
	return ret;
}

static void __exit qgpu_exit(void)
{
	qgpu_cdev_uninit();
	qgpu_pause_uninit();
	qgpu_attach_uninit();
	qgpu_gpus_uninit();
	qgpu_probes_uninit();
	qgpu_uvm_uninit();
	qgpu_pod_uninit();
	qgpu_clients_uninit();
}

module_init(qgpu_init);
module_exit(qgpu_exit);
MODULE_LICENSE("GPL");
MODULE_DESCRIPTION("Several pods share one NVIDIA GPU by policy");
MODULE_VERSION("0.1.0");
