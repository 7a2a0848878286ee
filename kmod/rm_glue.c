// SPDX-License-Identifier: GPL-2.0
/*
 * rm_glue.c - qgpu_rm.ko: hands the driver's kernel interface to qgpu.ko where it is a plain export.
 *
 * Before 565.57.01 nvidia_get_rm_ops is not GPL-only, and symbol_get() hands out only GPL-only symbols. A module that
 * links to it gets it, but then needs NVIDIA's module to load. qgpu.ko must load without it, so this is a separate
 * module.
 */
#include <linux/module.h>

#include "attach.h"

u32 nvidia_get_rm_ops(struct nv_rm_ops *ops);

static int __init rm_glue_init(void)
{
	return qgpu_rm_offer(nvidia_get_rm_ops);
}

static void __exit rm_glue_exit(void)
{
	qgpu_rm_withdraw();
}

module_init(rm_glue_init);
module_exit(rm_glue_exit);
MODULE_LICENSE("GPL");
MODULE_DESCRIPTION("qgpu: the NVIDIA driver's kernel interface on branches before 565");
