// SPDX-License-Identifier: GPL-2.0
/*
 * toctou.c - closes the gap between check and use. The driver copies a call's struct from user memory after the module
 * has checked it there. RM then copies the parameters that the struct points to. Both write answers to memory that
 * another thread can overwrite before the module reads them.
 *
 * A probe on rm_ioctl(stack, nv_state, file_private, nr, kernel copy, size) (osapi.c; the same on all known branches)
 * sees the kernel copy. At entry it restores the admitted content if the copy differs; at return it saves the answer.
 * RM copies parameters only through os_memcpy_from_user() and os_memcpy_to_user() (os-interface.c, called from
 * param_copy.c). Probes there restore what comes in, and save what goes out, in the same way.
 *
 * RM finds the file of a descriptor by nv_get_file_private(descriptor, control, where the file goes) (nv.c), before an
 * export is in that file. Another thread may have replaced the file meanwhile, so a probe there notes what it carries.
 *
 * Where one of the four cannot be probed (a driver without symbols), calls run unsealed: answers are then read from
 * user memory and compared with what RM says exists. QGPU_INFO_SEALED reports which is the case, and probe_watch.c
 * refuses limits then.
 */
#include <linux/hash.h>
#include <linux/sched.h>
#include <linux/spinlock.h>
#include <linux/string.h>

#include "driver_file.h"
#include "probes.h"
#include "pod.h"
#include "toctou.h"

#define TOCTOU_BITS 6
/*
 * Calls of pods in the driver at the same time. Without a free instance a probe silently skips even the entry handler.
 */
#define TOCTOU_CALLS (QGPU_MAX_PODS * QGPU_POD_CALLS)

struct toctou_bucket {
	raw_spinlock_t lock;
	struct hlist_head seals;
};

static struct toctou_bucket buckets[1 << TOCTOU_BITS];

static struct toctou_bucket *bucket_of(struct task_struct *task)
{
	return &buckets[hash_ptr(task, TOCTOU_BITS)];
}

/* Only its own task uses a seal; the lock protects the list of the bucket. */
static struct qgpu_toctou *seal_of_current(void)
{
	struct toctou_bucket *bucket = bucket_of(current);
	struct qgpu_toctou *seal, *found = NULL;
	unsigned long flags;

	if (hlist_empty(&bucket->seals))
		return NULL;
	raw_spin_lock_irqsave(&bucket->lock, flags);
	hlist_for_each_entry(seal, &bucket->seals, node) {
		if (seal->task == current)
			found = seal;
	}
	raw_spin_unlock_irqrestore(&bucket->lock, flags);
	return found;
}

static int entered(struct kretprobe_instance *instance, struct pt_regs *regs)
{
	u32 nr = regs_get_kernel_argument(regs, 3), size = regs_get_kernel_argument(regs, 5);
	struct qgpu_toctou *seal = seal_of_current();

	if (!seal)
		return 1;	/* not a pod's call: no return to watch */
	seal->data = (void *)regs_get_kernel_argument(regs, 4);
	if (seal->nr != nr || seal->size != size || !seal->data) {
		seal->data = NULL;
		return 1;
	}
	if (memcmp(seal->data, seal->in, size)) {
		seal->tampered = true;
		memcpy(seal->data, seal->in, size);
	}
	return 0;
}
NOKPROBE_SYMBOL(entered);

static int returned(struct kretprobe_instance *instance, struct pt_regs *regs)
{
	struct qgpu_toctou *seal = seal_of_current();

	if (seal && seal->data) {
		memcpy(seal->out, seal->data, seal->size);
		seal->answered = true;
		seal->failed = (u32)regs_return_value(regs);
		seal->data = NULL;
	}
	return 0;
}
NOKPROBE_SYMBOL(returned);

/* os_memcpy_from_user(to, from, size) */
struct copy {
	char *to;
	u64 from;
	u32 size;
};

static int copying_in(struct kretprobe_instance *instance, struct pt_regs *regs)
{
	struct qgpu_toctou *seal = seal_of_current();
	struct copy *copy = (struct copy *)instance->data;

	if (!seal || !seal->params_size)
		return 1;
	copy->to = (char *)regs_get_kernel_argument(regs, 0);
	copy->from = regs_get_kernel_argument(regs, 1);
	copy->size = regs_get_kernel_argument(regs, 2);
	return 0;
}
NOKPROBE_SYMBOL(copying_in);

static int copied_in(struct kretprobe_instance *instance, struct pt_regs *regs)
{
	const struct copy *copy = (struct copy *)instance->data;
	struct qgpu_toctou *seal = seal_of_current();
	u64 start, end;
	char *to;
	const char *admitted;

	if (!seal || !seal->params_size || (u32)regs_return_value(regs))
		return 0;
	start = max(copy->from, seal->params_at);
	end = min(copy->from + copy->size, seal->params_at + seal->params_size);
	if (start >= end)
		return 0;
	to = copy->to + (start - copy->from);
	admitted = (const char *)seal->params + (start - seal->params_at);
	if (memcmp(to, admitted, end - start)) {
		seal->tampered = true;
		memcpy(to, admitted, end - start);
	}
	return 0;
}
NOKPROBE_SYMBOL(copied_in);

/* os_memcpy_to_user(to, from, size): at entry, because the pod can make the copy itself fail. */
static int copying_out(struct kprobe *kprobe, struct pt_regs *regs)
{
	struct qgpu_toctou *seal = seal_of_current();

	if (seal && seal->params_size && regs_get_kernel_argument(regs, 0) == seal->params_at)
		memcpy(seal->params, (const void *)regs_get_kernel_argument(regs, 1),
		       min_t(u32, regs_get_kernel_argument(regs, 2), seal->params_size));
	return 0;
}
NOKPROBE_SYMBOL(copying_out);

static int finding_file(struct kretprobe_instance *instance, struct pt_regs *regs)
{
	*(struct file ***)instance->data = (struct file **)regs_get_kernel_argument(regs, 2);
	return !seal_of_current();
}
NOKPROBE_SYMBOL(finding_file);

static int found_file(struct kretprobe_instance *instance, struct pt_regs *regs)
{
	struct qgpu_toctou *seal = seal_of_current();
	struct qgpu_file *file;

	if (!seal || !regs_return_value(regs))
		return 0;
	file = qgpu_file_find(**(struct file ***)instance->data);	/* RM has a reference */
	if (!file)
		return 0;
	seal->carried |= atomic_fetch_or(seal->exports, &file->carries);
	if (seal->nr_exports && !seal->noted)
		seal->noted = qgpu_file_exports(file, seal->pod, seal->nr_exports);
	return 0;
}
NOKPROBE_SYMBOL(found_file);

static struct qgpu_probe probes[] = {
	{
		.symbol = "nvidia:nv_get_file_private",
		.entered = finding_file,
		.returned = found_file,
		.data_size = sizeof(struct file **),
	},
	{ .symbol = "nvidia:os_memcpy_to_user", .called = copying_out },
	{
		.symbol = "nvidia:os_memcpy_from_user",
		.entered = copying_in,
		.returned = copied_in,
		.data_size = sizeof(struct copy),
	},
	{ .symbol = "nvidia:rm_ioctl", .entered = entered, .returned = returned },
};

static struct qgpu_probes set = { "sealing calls", probes, ARRAY_SIZE(probes) };

void qgpu_toctou_init(void)
{
	int i;

	for (i = 0; i < ARRAY_SIZE(buckets); i++)
		raw_spin_lock_init(&buckets[i].lock);
}

void qgpu_toctou_start(void)
{
	int i;

	/* other tasks need an instance too, while an entry handler runs */
	for (i = 0; i < ARRAY_SIZE(probes); i++)
		probes[i].at_once = TOCTOU_CALLS + num_possible_cpus();
	if (!set.placed)
		qgpu_probes_place(&set);
}

void qgpu_toctou_stop(void)
{
	qgpu_probes_remove(&set);
}

bool qgpu_toctou_sealed(void)
{
	return qgpu_probes_work(&set);
}

unsigned long qgpu_toctou_missed(void)
{
	return qgpu_probes_missed(&set);
}

void qgpu_toctou_begin(struct qgpu_toctou *seal)
{
	struct toctou_bucket *bucket = bucket_of(current);
	unsigned long flags;

	seal->task = current;
	raw_spin_lock_irqsave(&bucket->lock, flags);
	hlist_add_head(&seal->node, &bucket->seals);
	raw_spin_unlock_irqrestore(&bucket->lock, flags);
}

void qgpu_toctou_end(struct qgpu_toctou *seal)
{
	struct toctou_bucket *bucket = bucket_of(current);
	unsigned long flags;

	raw_spin_lock_irqsave(&bucket->lock, flags);
	hlist_del(&seal->node);
	raw_spin_unlock_irqrestore(&bucket->lock, flags);
}
