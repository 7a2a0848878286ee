// SPDX-License-Identifier: GPL-2.0
/*
 * rival.c - another module that changes the driver, as live patches and other interposers do: "symbol=" is redirected by
 * ftrace (and so goes on as before), "table=1" puts a function in front of the ioctl of the driver's own table.
 */
#include <linux/file.h>
#include <linux/fs.h>
#include <linux/ftrace.h>
#include <linux/kprobes.h>
#include <linux/module.h>
#include <linux/version.h>

static char *symbol;
module_param(symbol, charp, 0444);
static bool table;
module_param(table, bool, 0444);
static unsigned long calls;
module_param(calls, ulong, 0444);

static unsigned long at;
static struct file_operations *fops;
static long (*before)(struct file *filp, unsigned int cmd, unsigned long arg);

#if LINUX_VERSION_CODE >= KERNEL_VERSION(5, 11, 0)
static void redirected(unsigned long ip, unsigned long parent, struct ftrace_ops *ops, struct ftrace_regs *regs)
#else
static void redirected(unsigned long ip, unsigned long parent, struct ftrace_ops *ops, struct pt_regs *regs)
#endif
{
	calls++;
}

static struct ftrace_ops ops = {
	.func = redirected,
	.flags = FTRACE_OPS_FL_SAVE_REGS | FTRACE_OPS_FL_IPMODIFY,
};

static int nothing(struct kprobe *probe, struct pt_regs *regs)
{
	return 0;
}

/* A probe knows where a symbol is. */
static int redirect(void)
{
	struct kprobe probe = { .symbol_name = symbol, .pre_handler = nothing };
	int ret = register_kprobe(&probe);

	if (ret)
		return ret;
	at = (unsigned long)probe.addr;
	unregister_kprobe(&probe);
	ret = ftrace_set_filter_ip(&ops, at, 0, 0);
	return ret ?: register_ftrace_function(&ops);
}

static long in_front(struct file *filp, unsigned int cmd, unsigned long arg)
{
	calls++;
	return before(filp, cmd, arg);
}

static int stand_in_front(void)
{
	struct file *filp = filp_open("/dev/nvidiactl", O_RDWR, 0);

	if (IS_ERR(filp))
		return PTR_ERR(filp);
	fops = (struct file_operations *)filp->f_op;
	fput(filp);
	before = fops->unlocked_ioctl;
	smp_store_release(&fops->unlocked_ioctl, in_front);
	return 0;
}

static int __init rival_init(void)
{
	int ret = symbol ? redirect() : 0;

	return ret ?: table ? stand_in_front() : 0;
}

static void __exit rival_exit(void)
{
	if (fops)
		smp_store_release(&fops->unlocked_ioctl, before);
	if (at)
		unregister_ftrace_function(&ops);
	synchronize_rcu_tasks();
}

module_init(rival_init);
module_exit(rival_exit);
MODULE_LICENSE("GPL");
MODULE_DESCRIPTION("qgpu test bed: another module that changes the driver");
