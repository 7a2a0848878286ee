// SPDX-License-Identifier: GPL-2.0
/*
 * seal.c - closes the gap between check and use. The driver copies a call's struct from user memory after we have
 * looked at it there, and writes its answer where another thread can overwrite it before we read it.
 *
 * A probe on rm_ioctl(stack, nv_state, file_private, nr, kernel copy, size) (osapi.c; one for all branches known)
 * sees the kernel copy: at entry what was admitted is put back if it differs, at return the answer is taken. What
 * is nested behind pointers is still read later; the true size of memory is asked of RM (escape.c).
 *
 * Without the probe (a driver without symbols) calls go on unsealed: answers are then read from user memory and
 * compared with what RM says exists. QGPU_INFO_SEALED tells which it is.
 */
#include <linux/hash.h>
#include <linux/kprobes.h>
#include <linux/module.h>
#include <linux/sched.h>
#include <linux/spinlock.h>
#include <linux/string.h>

#include "pod.h"
#include "seal.h"

#define SEAL_BITS 6
/* Calls of pods in the driver at once: without a free instance a probe passes over even the entry, without a word. */
#define SEAL_CALLS (QGPU_MAX_PODS * QGPU_POD_CALLS)

struct seal_bucket {
	raw_spinlock_t lock;
	struct hlist_head seals;
};

static struct seal_bucket buckets[1 << SEAL_BITS];
static bool sealed;

static struct seal_bucket *bucket_of(struct task_struct *task)
{
	return &buckets[hash_ptr(task, SEAL_BITS)];
}

/* A seal is its own task's alone; the lock only keeps the list in order against others in the bucket. */
static struct qgpu_seal *seal_of_current(void)
{
	struct seal_bucket *bucket = bucket_of(current);
	struct qgpu_seal *seal, *found = NULL;
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
	struct qgpu_seal *seal = seal_of_current();

	if (!seal)
		return 1;	/* nobody of ours: no return to watch */
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
	struct qgpu_seal *seal = seal_of_current();

	if (seal && seal->data) {
		memcpy(seal->out, seal->data, seal->size);
		seal->answered = true;
		seal->failed = (u32)regs_return_value(regs);
		seal->data = NULL;
	}
	return 0;
}
NOKPROBE_SYMBOL(returned);

static struct kretprobe probe;

void qgpu_seal_init(struct module *nvidia)
{
	int i;

	for (i = 0; i < ARRAY_SIZE(buckets); i++)
		raw_spin_lock_init(&buckets[i].lock);
	probe = (struct kretprobe){
		.kp.symbol_name = "nvidia:rm_ioctl",
		.entry_handler = entered,
		.handler = returned,
		.maxactive = SEAL_CALLS + num_possible_cpus(),	/* others need one for as long as entered() runs */
	};
	WRITE_ONCE(sealed, !register_kretprobe(&probe));
}

void qgpu_seal_uninit(void)
{
	if (sealed)
		unregister_kretprobe(&probe);
	WRITE_ONCE(sealed, false);
}

bool qgpu_sealed(void)
{
	return READ_ONCE(sealed);
}

void qgpu_seal_begin(struct qgpu_seal *seal, u32 nr, const void *in, void *out, u32 size)
{
	struct seal_bucket *bucket = bucket_of(current);
	unsigned long flags;

	*seal = (struct qgpu_seal){ .task = current, .nr = nr, .size = size, .in = in, .out = out };
	raw_spin_lock_irqsave(&bucket->lock, flags);
	hlist_add_head(&seal->node, &bucket->seals);
	raw_spin_unlock_irqrestore(&bucket->lock, flags);
}

void qgpu_seal_end(struct qgpu_seal *seal)
{
	struct seal_bucket *bucket = bucket_of(current);
	unsigned long flags;

	raw_spin_lock_irqsave(&bucket->lock, flags);
	hlist_del(&seal->node);
	raw_spin_unlock_irqrestore(&bucket->lock, flags);
}
