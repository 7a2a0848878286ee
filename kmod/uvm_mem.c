// SPDX-License-Identifier: GPL-2.0
/*
 * uvm_mem.c - memory that UVM holds: it makes a duplicate of what a process maps, in a client of its own, so memory
 * outlives its handles until it is unmapped too. Many programs give the handle back first. Here such a duplicate keeps
 * the charge. What it is charged to is left to mem.c.
 *
 * Both functions are exported by the driver, with the same arguments from 535 to 595 (nv_uvm_interface.c); the handles
 * in them are the kernel's own copies. A handle is looked up before the duplicate is made: memory that takes the handle
 * meanwhile has another's size, so it is looked up again after, and what is not the same is charged to both.
 */
#include <linux/hashtable.h>
#include <linux/kprobes.h>
#include <linux/list.h>
#include <linux/slab.h>
#include <linux/spinlock.h>

#include "client.h"
#include "mem.h"
#include "nvrm.h"
#include "uvm_mem.h"

/* Tasks in one of the two at once; without a free instance a probe would pass over a call. */
#define AT_ONCE 1024

/* A duplicate of UVM's: being made, there, or being freed. */
struct held {
	struct hlist_node node;
	unsigned long device;
	u32 client, memory;		/* what is duplicated */
	const u32 *made;		/* where its handle will stand */
	u32 handle;
	struct qgpu_mem *mem, *other;	/* references; other: what had the handle afterwards, if not the same */
};

/* What the two probes of a call share. */
struct call {
	struct held *held;
};

static DEFINE_SPINLOCK(held_lock);	/* protects what follows; mem_lock (mem.c) is not taken inside */
static DEFINE_HASHTABLE(there, 10);
static HLIST_HEAD(under_way);

static void held_free(struct held *held)
{
	qgpu_mem_put(held->mem);
	qgpu_mem_put(held->other);
	kfree(held);
}

static int dup_called(struct kretprobe_instance *instance, struct pt_regs *regs)
{
	struct call *call = (struct call *)instance->data;
	struct held *held = kzalloc(sizeof(*held), GFP_ATOMIC | __GFP_NOWARN);

	if (!held)
		return 1;
	held->device = regs_get_kernel_argument(regs, 0);
	held->client = regs_get_kernel_argument(regs, 1);
	held->memory = regs_get_kernel_argument(regs, 2);
	held->made = (const u32 *)regs_get_kernel_argument(regs, 3);
	held->mem = qgpu_client_mem(held->client, held->memory);
	call->held = held;
	spin_lock(&held_lock);
	hlist_add_head(&held->node, &under_way);
	spin_unlock(&held_lock);
	return 0;
}

static int dup_returned(struct kretprobe_instance *instance, struct pt_regs *regs)
{
	struct held *held = ((struct call *)instance->data)->held;
	bool made = (u32)regs_return_value(regs) == NV_OK;

	if (made) {
		held->other = qgpu_client_mem(held->client, held->memory);
		if (held->other == held->mem) {
			qgpu_mem_put(held->other);
			held->other = NULL;
		}
		made = held->mem || held->other;
		held->handle = *held->made;
	}
	spin_lock(&held_lock);
	hlist_del(&held->node);
	if (made)
		hash_add(there, &held->node, held->handle);
	spin_unlock(&held_lock);
	if (!made)
		held_free(held);
	return 0;
}

static int free_called(struct kretprobe_instance *instance, struct pt_regs *regs)
{
	unsigned long device = regs_get_kernel_argument(regs, 0);
	u32 handle = regs_get_kernel_argument(regs, 1);
	struct held *held, *found = NULL;

	spin_lock(&held_lock);
	hash_for_each_possible(there, held, node, handle) {
		if (held->handle == handle && held->device == device)
			found = held;
	}
	if (found) {
		hash_del(&found->node);
		hlist_add_head(&found->node, &under_way);
	}
	spin_unlock(&held_lock);
	((struct call *)instance->data)->held = found;
	return !found;
}

static int free_returned(struct kretprobe_instance *instance, struct pt_regs *regs)
{
	struct held *held = ((struct call *)instance->data)->held;

	spin_lock(&held_lock);
	hlist_del(&held->node);
	spin_unlock(&held_lock);
	held_free(held);
	return 0;
}

static struct kretprobe probes[2];
static bool placed;	/* under qgpu_attach_lock */

void qgpu_uvm_mem_start(void)
{
	probes[0] = (struct kretprobe){
		.kp.symbol_name = "nvidia:nvUvmInterfaceFreeDupedHandle",
		.entry_handler = free_called,
		.handler = free_returned,
		.data_size = sizeof(struct call),
		.maxactive = AT_ONCE,
	};
	probes[1] = (struct kretprobe){
		.kp.symbol_name = "nvidia:nvUvmInterfaceDupMemory",
		.entry_handler = dup_called,
		.handler = dup_returned,
		.data_size = sizeof(struct call),
		.maxactive = AT_ONCE,
	};
	if (register_kretprobe(&probes[0]))
		return;
	placed = !register_kretprobe(&probes[1]);
	if (!placed)
		unregister_kretprobe(&probes[0]);
}

void qgpu_uvm_mem_stop(void)
{
	struct hlist_node *next;
	struct held *held;
	int bucket;

	if (!placed)
		return;
	/* A call that is under way now does not come back here: what it held is dropped with the rest. */
	unregister_kretprobe(&probes[1]);
	unregister_kretprobe(&probes[0]);
	placed = false;
	hash_for_each_safe(there, bucket, next, held, node) {
		hash_del(&held->node);
		held_free(held);
	}
	hlist_for_each_entry_safe(held, next, &under_way, node) {
		hlist_del(&held->node);
		held_free(held);
	}
}
