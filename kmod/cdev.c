// SPDX-License-Identifier: GPL-2.0
/*
 * cdev.c - /dev/qgpu: copies arguments from user space, checks every member, and calls the code behind each ioctl.
 * Closing a descriptor ends its plans. uapi/qgpu.h documents the calls.
 */
#include <linux/capability.h>
#include <linux/fs.h>
#include <linux/kernel.h>
#include <linux/miscdevice.h>
#include <linux/module.h>
#include <linux/slab.h>
#include <linux/uaccess.h>

#include "attach.h"
#include "cdev.h"
#include "client.h"
#include "events.h"
#include "mem.h"
#include "plan.h"
#include "plan_runner.h"
#include "pod.h"
#include "probe_watch.h"

static struct qgpu_gpu *gpu_at(u32 index)
{
	return index < (u32)qgpu_gpu_count() ? &qgpu_gpus[index] : NULL;
}

static int do_info(void *owner, void *arg)
{
	struct qgpu_info *info = arg;

	qgpu_try_attach();	/* the device node may have appeared after the driver */
	memset(info, 0, sizeof(*info));
	qgpu_attach_info(info);
	info->abi = QGPU_ABI_VERSION;
	info->nr_pods = qgpu_pod_count();
	info->nr_clients = atomic_read(&qgpu_nr_clients);
	info->nr_objects = atomic_read(&qgpu_nr_objects);
	return 0;
}

static int do_gpu(void *owner, void *arg)
{
	struct qgpu_gpu_info *info = arg;
	struct qgpu_gpu *gpu = gpu_at(info->gpu);

	if (!gpu)
		return -ENOENT;
	info->gpu_id = gpu->gpu_id;
	info->domain = gpu->domain;
	info->bus = gpu->bus;
	info->slot = gpu->slot;
	info->function = gpu->function;
	info->memory = READ_ONCE(gpu->memory);
	return 0;
}

static int do_pod_add(void *owner, void *arg)
{
	struct qgpu_pod_add *add = arg;
	size_t length = strnlen(add->name, sizeof(add->name));

	if (add->flags || !length || memchr_inv(add->name + length, 0, sizeof(add->name) - length) ||
	    length == sizeof(add->name))
		return -EINVAL;
	qgpu_try_attach();
	return qgpu_pod_add(add->cgroup_fd, add->name, &add->pod);
}

static int do_pod_remove(void *owner, void *arg)
{
	const struct qgpu_pod_remove *remove = arg;
	int ret;

	if (remove->flags || remove->pad)
		return -EINVAL;
	ret = qgpu_pod_remove(remove->pod);
	if (!ret)
		qgpu_runner_refresh();	/* its gates are open when the call returns */
	return ret;
}

static int do_pod_next(void *owner, void *arg)
{
	struct qgpu_pod_next *next = arg;
	struct qgpu_pod *pod = qgpu_pod_next(next->pod);

	if (!pod)
		return -ENOENT;
	*next = (struct qgpu_pod_next){
		.pod = pod->id,
		.cgroup = cgroup_id(pod->cgroup),
		.flags = atomic_read(&pod->flags),
		.nr_files = atomic_read(&pod->nr_files),
		.nr_clients = atomic_read(&pod->nr_clients),
		.refused_allocs = atomic64_read(&pod->refused_allocs),
		.refused_controls = atomic64_read(&pod->refused_controls),
		.refused_objects = atomic64_read(&pod->refused_objects),
	};
	memcpy(next->name, pod->name, sizeof(next->name));
	qgpu_pod_put(pod);
	return 0;
}

static int do_pod_join(void *owner, void *arg)
{
	const struct qgpu_pod_cgroup *join = arg;

	return join->cgroup || join->flags ? -EINVAL : qgpu_pod_join(join->pod, join->cgroup_fd);
}

static int do_pod_leave(void *owner, void *arg)
{
	const struct qgpu_pod_cgroup *leave = arg;

	return leave->cgroup_fd || leave->flags ? -EINVAL : qgpu_pod_leave_cgroup(leave->pod, leave->cgroup);
}

static int do_pod_joined_next(void *owner, void *arg)
{
	struct qgpu_pod_cgroup *next = arg;

	return next->cgroup_fd || next->flags ? -EINVAL : qgpu_pod_joined_next(next->pod, &next->cgroup);
}

static int do_grant_set(void *owner, void *arg)
{
	const struct qgpu_grant *grant = arg;

	if (grant->flags || grant->pod_class > QGPU_CLASS_ONLINE || grant->cores > 100 || !gpu_at(grant->gpu))
		return -EINVAL;
	return qgpu_pod_grant(grant->pod, grant, !qgpu_probe_watch_check());
}

static int do_grant_get(void *owner, void *arg)
{
	struct qgpu_grant *grant = arg;
	struct qgpu_share *share;
	struct qgpu_pod *pod;
	bool granted;
	u64 limit;

	if (!gpu_at(grant->gpu) || grant->flags)
		return -EINVAL;
	pod = qgpu_pod_find(grant->pod);
	if (IS_ERR(pod))
		return PTR_ERR(pod);
	share = &pod->shares[grant->gpu];
	limit = READ_ONCE(share->memory_limit);
	grant->pod_class = share->pod_class;
	grant->cores = share->cores;
	grant->latency_target_ns = share->latency_target_ns;
	grant->memory = limit == U64_MAX ? 0 : limit;
	granted = share->granted;
	qgpu_pod_put(pod);
	return granted ? 0 : -ENOENT;
}

static int do_usage(void *owner, void *arg)
{
	struct qgpu_usage *usage = arg;
	struct qgpu_gpu *gpu = gpu_at(usage->gpu);
	struct qgpu_pod *pod;

	if (!gpu)
		return -EINVAL;
	pod = qgpu_pod_find(usage->pod);
	if (IS_ERR(pod))
		return PTR_ERR(pod);
	*usage = (struct qgpu_usage){ .pod = pod->id, .gpu = usage->gpu };
	qgpu_mem_usage(pod, usage->gpu, &usage->memory, &usage->peak_memory);
	qgpu_runner_usage(gpu, pod, usage);
	qgpu_pod_put(pod);
	return 0;
}

static int do_tsg_next(void *owner, void *arg)
{
	struct qgpu_tsg_next *next = arg;
	struct qgpu_gpu *gpu = gpu_at(next->gpu);

	return gpu ? qgpu_tsg_next(gpu, next) : -EINVAL;
}

static int do_handle_next(void *owner, void *arg)
{
	struct qgpu_handle_next *next = arg;
	struct qgpu_gpu *gpu = gpu_at(next->gpu);

	return gpu ? qgpu_tsg_handle_next(gpu, next) : -EINVAL;
}

static int do_plan(void *owner, void *arg)
{
	const struct qgpu_plan *plan = arg;
	struct qgpu_gpu *gpu = gpu_at(plan->gpu);
	struct qgpu_timeline *timeline;
	int ret;

	if (!gpu)
		return -EINVAL;
	timeline = qgpu_plan_read(plan);
	if (IS_ERR(timeline))
		return PTR_ERR(timeline);
	ret = qgpu_runner_set(gpu, owner, timeline, plan->lease_ns);
	if (ret)
		qgpu_timeline_free(timeline);
	return ret;
}

static int do_renew(void *owner, void *arg)
{
	const struct qgpu_renew *renew = arg;
	struct qgpu_gpu *gpu = gpu_at(renew->gpu);

	return gpu && !renew->flags ? qgpu_runner_renew(gpu, owner) : -EINVAL;
}

static int do_idle(void *owner, void *arg)
{
	const struct qgpu_idle *idle = arg;
	struct qgpu_gpu *gpu = gpu_at(idle->gpu);

	return gpu && idle->idle <= 1 ? qgpu_runner_idle(gpu, owner, idle->pod, idle->idle) : -EINVAL;
}

/* The reader of a descriptor is also the owner of its plans. */
static const struct {
	unsigned int cmd;
	int (*call)(void *owner, void *arg);
} commands[] = {
	{ QGPU_IOC_INFO, do_info },
	{ QGPU_IOC_GPU, do_gpu },
	{ QGPU_IOC_POD_ADD, do_pod_add },
	{ QGPU_IOC_POD_REMOVE, do_pod_remove },
	{ QGPU_IOC_POD_NEXT, do_pod_next },
	{ QGPU_IOC_GRANT_SET, do_grant_set },
	{ QGPU_IOC_GRANT_GET, do_grant_get },
	{ QGPU_IOC_USAGE, do_usage },
	{ QGPU_IOC_TSG_NEXT, do_tsg_next },
	{ QGPU_IOC_PLAN, do_plan },
	{ QGPU_IOC_RENEW, do_renew },
	{ QGPU_IOC_IDLE, do_idle },
	{ QGPU_IOC_HANDLE_NEXT, do_handle_next },
	{ QGPU_IOC_POD_JOIN, do_pod_join },
	{ QGPU_IOC_POD_LEAVE, do_pod_leave },
	{ QGPU_IOC_POD_JOINED_NEXT, do_pod_joined_next },
};

#define ARG_MAX_SIZE 256

/* The caller may be of another version: its struct may be shorter or longer than ours, as uapi/qgpu.h says. */
#define WITHOUT_SIZE(cmd)	((cmd) & ~_IOC(0, 0, 0, _IOC_SIZEMASK))

static int answer(void __user *to, size_t size, const void *arg, size_t known)
{
	size_t both = min(size, known);

	return copy_to_user(to, arg, both) || clear_user(to + both, size - both) ? -EFAULT : 0;
}

static long cdev_ioctl(struct file *filp, unsigned int cmd, unsigned long arg_user)
{
	void __user *user = (void __user *)arg_user;
	u64 arg[ARG_MAX_SIZE / sizeof(u64)] = {};
	size_t i, known;
	int ret = 0;

	for (i = 0; i < ARRAY_SIZE(commands) && WITHOUT_SIZE(commands[i].cmd) != WITHOUT_SIZE(cmd); i++)
		;
	if (i == ARRAY_SIZE(commands) || !_IOC_SIZE(cmd))
		return -ENOTTY;
	known = _IOC_SIZE(commands[i].cmd);
	if (_IOC_DIR(cmd) & _IOC_WRITE)
		ret = copy_struct_from_user(arg, known, user, _IOC_SIZE(cmd));
	if (!ret)
		ret = commands[i].call(filp->private_data, arg);
	if (!ret && _IOC_DIR(cmd) & _IOC_READ)
		ret = answer(user, _IOC_SIZE(cmd), arg, known);
	return ret;
}

static ssize_t cdev_read(struct file *filp, char __user *to, size_t size, loff_t *pos)
{
	return qgpu_reader_read(filp->private_data, to, size, filp->f_flags & O_NONBLOCK);
}

static __poll_t cdev_poll(struct file *filp, poll_table *table)
{
	return qgpu_reader_poll(filp->private_data, filp, table);
}

/* Refuse every process in a pod, root included: a pod must not change its own grants. */
static int cdev_open(struct inode *inode, struct file *filp)
{
	struct qgpu_pod *pod = qgpu_pod_of_current();
	struct qgpu_reader *reader;

	qgpu_pod_put(pod);
	if (pod || !capable(CAP_SYS_ADMIN))
		return -EPERM;
	reader = kzalloc(sizeof(*reader), GFP_KERNEL);
	if (!reader)
		return -ENOMEM;
	qgpu_reader_add(reader);
	filp->private_data = reader;
	return stream_open(inode, filp);
}

static int cdev_release(struct inode *inode, struct file *filp)
{
	struct qgpu_reader *reader = filp->private_data;

	qgpu_runner_drop(reader);
	qgpu_reader_remove(reader);
	kfree(reader);
	return 0;
}

static const struct file_operations cdev_fops = {
	.owner = THIS_MODULE,
	.open = cdev_open,
	.release = cdev_release,
	.unlocked_ioctl = cdev_ioctl,
	.compat_ioctl = cdev_ioctl,
	.read = cdev_read,
	.poll = cdev_poll,
	.llseek = noop_llseek,
};

static struct miscdevice cdev = {
	.minor = MISC_DYNAMIC_MINOR,
	.name = "qgpu",
	.fops = &cdev_fops,
	.mode = 0600,
};

int qgpu_cdev_init(void)
{
	size_t i;

	for (i = 0; i < ARRAY_SIZE(commands); i++)
		WARN_ON(_IOC_SIZE(commands[i].cmd) > ARG_MAX_SIZE);
	return misc_register(&cdev);
}

void qgpu_cdev_uninit(void)
{
	misc_deregister(&cdev);
}
