// SPDX-License-Identifier: GPL-2.0
/*
 * uvm_mem.c - what UVM takes of a pod's RM clients: nothing of another pod's, and how long memory that it holds stays
 * charged. When a process maps memory, UVM duplicates it into a client of its own, so the
 * memory outlives its handles until it is unmapped too. Many programs free the handle first. Here such a duplicate
 * keeps the charge for the memory and for the page tables of its mapping. mem.c and uvm_tables.c decide which pod is
 * charged, and how much.
 *
 * The driver exports these functions, with the same arguments from 535 to 595 (nv_uvm_interface.c); the handles in them
 * are the kernel's own copies. A handle is looked up before the duplicate is made. Other memory may take the handle in
 * the meantime, so it is looked up again afterwards; if the two differ, both are charged. If RM has made memory that is
 * not yet in the object table, qgpu_uvm_mem_found() matches it later.
 */
#include <linux/hashtable.h>
#include <linux/list.h>
#include <linux/sched.h>
#include <linux/slab.h>
#include <linux/spinlock.h>

#include "client.h"
#include "compat.h"
#include "probes.h"
#include "mem.h"
#include "nvrm.h"
#include "uvm_mem.h"
#include "uvm_tables.h"

/* Tasks inside one of the two at the same time; without a free instance a probe would miss a call. */
#define AT_ONCE 1024

/* A duplicate of UVM: being made, present, or being freed. */
struct held {
	struct hlist_node node;
	struct hlist_node unknown_node;	/* while it is unknown which memory it is */
	unsigned long device;
	u32 client, memory;		/* the duplicated memory */
	u64 pod;			/* the client's pod; 0: none */
	const u32 *made;		/* where RM will write its handle */
	const struct nv_uvm_memory_info *info;	/* where RM will describe it */
	u32 handle;
	struct qgpu_mem *mem, *other;	/* references; other: what had the handle afterwards, if different */
	struct qgpu_tables *tables;	/* a reference; of its mapping, or NULL */
	u64 tables_size;
};

/* What the two probes of a call share. */
struct call {
	struct held *held;
};

/* A task that has UVM map something. */
struct mapper {
	struct hlist_node node;
	struct task_struct *task;
	struct qgpu_tables *tables;	/* a reference */
	u64 size, left;			/* left: not yet charged to a mapping */
};

static DEFINE_SPINLOCK(held_lock);	/* protects what follows; taken before the locks of uvm_tables.c and mem.c */
static DEFINE_HASHTABLE(there, 10);	/* by handle */
static DEFINE_HASHTABLE(unknown, 8);	/* by the duplicated memory; these are in there as well */
static HLIST_HEAD(under_way);
static DEFINE_HASHTABLE(mappers, 6);	/* by task */

static atomic_long_t unseen = ATOMIC_LONG_INIT(0);	/* calls for which there was no kernel memory */

static void drop_tables(struct qgpu_tables *tables, u64 size)
{
	if (!tables)
		return;
	if (size)
		qgpu_tables_sub(tables, size);
	qgpu_tables_put(tables);
}

static void held_free(struct held *held)
{
	qgpu_mem_put(held->mem);
	qgpu_mem_put(held->other);
	drop_tables(held->tables, held->tables_size);
	kfree(held);
}

static void mapper_free(struct mapper *mapper)
{
	drop_tables(mapper->tables, mapper->left);
	kfree(mapper);
}

static struct mapper *mapper_of_current(void)
{
	struct mapper *mapper;

	lockdep_assert_held(&held_lock);
	hash_for_each_possible(mappers, mapper, node, (unsigned long)current) {
		if (mapper->task == current)
			return mapper;
	}
	return NULL;
}

int qgpu_uvm_mem_map(struct qgpu_tables *tables, u64 size)
{
	struct mapper *mapper = kzalloc(sizeof(*mapper), GFP_ATOMIC | __GFP_NOWARN);

	if (!mapper)
		return -ENOMEM;
	qgpu_uvm_mem_mapped();	/* the probe may have missed the end of the last one */
	mapper->task = current;
	mapper->tables = qgpu_tables_get(tables);
	mapper->size = mapper->left = size;
	spin_lock(&held_lock);
	hash_add(mappers, &mapper->node, (unsigned long)current);
	spin_unlock(&held_lock);
	return 0;
}

void qgpu_uvm_mem_mapped(void)
{
	struct mapper *mapper;

	spin_lock(&held_lock);
	mapper = mapper_of_current();
	if (mapper)
		hash_del(&mapper->node);
	spin_unlock(&held_lock);
	if (mapper)
		mapper_free(mapper);
}

/* A call can map for several cards, each by a duplicate with its own page tables; the room was reserved once. */
static void take_tables(struct held *held)
{
	struct mapper *mapper = mapper_of_current();

	if (!mapper)
		return;
	held->tables = qgpu_tables_get(mapper->tables);
	if (mapper->left)
		held->tables_size = mapper->left;
	else if (!qgpu_tables_add(mapper->tables, mapper->size))
		held->tables_size = mapper->size;
	mapper->left = 0;
}

static bool is_found(struct held *held, const struct qgpu_client *client, u32 handle, struct qgpu_mem *mem)
{
	if (held->mem || held->client != client->handle || held->memory != handle || held->pod != client->pod->id)
		return false;
	held->mem = qgpu_mem_get(mem);
	return true;
}

bool qgpu_uvm_mem_found(struct qgpu_client *client, u32 handle, struct qgpu_mem *mem)
{
	struct hlist_node *next;
	struct held *held;
	bool found = false;

	spin_lock(&held_lock);
	hlist_for_each_entry(held, &under_way, node)
		found |= is_found(held, client, handle, mem);
	hash_for_each_possible_safe(unknown, held, next, unknown_node, client->handle ^ handle) {
		if (!is_found(held, client, handle, mem))
			continue;
		hash_del(&held->unknown_node);
		found = true;
	}
	spin_unlock(&held_lock);
	return found;
}

/*
 * RM gives UVM what another pod shares with all, or what was made by a process with the number of this one. UVM passes
 * the caller's client on, and not its control file.
 */
static bool refuse_foreign(struct pt_regs *regs)
{
	u32 client = regs_get_kernel_argument(regs, 1);
	struct qgpu_pod *pod = qgpu_pod_of_current();
	u64 of = pod ? qgpu_client_pod(client) : 0;
	bool foreign = of && of != pod->id;

	qgpu_pod_put(pod);
	if (foreign)
		qgpu_set_argument_1(regs, 0);	/* RM has no such client */
	return foreign;
}

/* UVM registers an address space or a channel: name(..., client, handle, ...). */
static int register_called(struct kprobe *probe, struct pt_regs *regs)
{
	refuse_foreign(regs);
	return 0;
}

static int dup_called(struct kretprobe_instance *instance, struct pt_regs *regs)
{
	struct call *call = (struct call *)instance->data;
	struct held *held;

	if (refuse_foreign(regs))
		return 1;
	held = kzalloc(sizeof(*held), GFP_ATOMIC | __GFP_NOWARN);
	if (!held) {
		atomic_long_inc(&unseen);
		return 1;
	}
	held->device = regs_get_kernel_argument(regs, 0);
	held->client = regs_get_kernel_argument(regs, 1);
	held->memory = regs_get_kernel_argument(regs, 2);
	held->made = (const u32 *)regs_get_kernel_argument(regs, 3);
	held->info = (const struct nv_uvm_memory_info *)regs_get_kernel_argument(regs, 4);
	held->mem = qgpu_client_mem(held->client, held->memory);
	held->pod = qgpu_client_pod(held->client);
	call->held = held;
	spin_lock(&held_lock);
	take_tables(held);
	hlist_add_head(&held->node, &under_way);
	spin_unlock(&held_lock);
	return 0;
}

/* Move it to its new state. False: it is to be freed. */
static bool settle(struct held *held, bool made)
{
	bool is_unknown;

	lockdep_assert_held(&held_lock);
	hlist_del(&held->node);
	is_unknown = made && !held->mem && !held->other && held->pod && held->info && !held->info->sysmem;
	if (!made || !(held->mem || held->other || held->tables || is_unknown))
		return false;
	hash_add(there, &held->node, held->handle);
	if (is_unknown)
		hash_add(unknown, &held->unknown_node, held->client ^ held->memory);
	return true;
}

static int dup_returned(struct kretprobe_instance *instance, struct pt_regs *regs)
{
	struct held *held = ((struct call *)instance->data)->held;
	bool made = (u32)regs_return_value(regs) == NV_OK;
	struct qgpu_mem *after = NULL;

	if (made) {
		after = qgpu_client_mem(held->client, held->memory);
		held->handle = *held->made;
	}
	spin_lock(&held_lock);
	if (after != held->mem) {
		held->other = after;
		after = NULL;
	}
	made = settle(held, made);
	spin_unlock(&held_lock);
	qgpu_mem_put(after);
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
		hash_del(&found->unknown_node);
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

static struct qgpu_probe probes[] = {
	{ .symbol = "nvidia:nvUvmInterfaceDupAddressSpace", .called = register_called },
	{ .symbol = "nvidia:nvUvmInterfaceRetainChannel", .called = register_called },
	{
		.symbol = "nvidia:nvUvmInterfaceFreeDupedHandle",
		.entered = free_called,
		.returned = free_returned,
		.data_size = sizeof(struct call),
		.at_once = AT_ONCE,
	},
	{
		.symbol = "nvidia:nvUvmInterfaceDupMemory",
		.entered = dup_called,
		.returned = dup_returned,
		.data_size = sizeof(struct call),
		.at_once = AT_ONCE,
	},
};

static struct qgpu_probes set = { "memory that UVM holds", probes, ARRAY_SIZE(probes) };

void qgpu_uvm_mem_start(void)
{
	if (!set.placed)
		qgpu_probes_place(&set);
}

bool qgpu_uvm_mem_counted(void)
{
	return qgpu_probes_work(&set);
}

unsigned long qgpu_uvm_mem_missed(void)
{
	return qgpu_probes_missed(&set) + atomic_long_xchg(&unseen, 0);
}

void qgpu_uvm_mem_stop(void)
{
	struct hlist_node *next;
	struct mapper *mapper;
	struct held *held;
	int bucket;

	/* A call under way does not come back here, so what it held is dropped with the rest. */
	qgpu_probes_remove(&set);
	hash_for_each_safe(there, bucket, next, held, node) {
		hash_del(&held->node);
		hash_del(&held->unknown_node);
		held_free(held);
	}
	hlist_for_each_entry_safe(held, next, &under_way, node) {
		hlist_del(&held->node);
		held_free(held);
	}
	hash_for_each_safe(mappers, bucket, next, mapper, node) {
		hash_del(&mapper->node);
		mapper_free(mapper);
	}
}
