// SPDX-License-Identifier: GPL-2.0
/*
 * uvm_mem.c - what UVM takes of a pod's RM clients: nothing of another pod's, and how long what it holds stays charged.
 * When a process maps memory, UVM duplicates it into a client of its own, so the memory outlives its handles until it
 * is unmapped too. Many programs free the handle first. Here such a duplicate keeps the charge for the memory and for
 * the page tables of its mapping. When a process registers a channel, UVM duplicates the channel's TSG, whose context
 * buffers then outlive its handles; that keeps the TSG's charge. An address space that it registers is charged once
 * more, because UVM makes page tables of its own in it. mem.c and uvm_tables.c decide which pod is charged, and how
 * much.
 *
 * The driver exports these functions, with the same arguments from 535 to 595 (nv_uvm_interface.c); the handles in them
 * are the kernel's own copies. A handle is looked up before the duplicate is made. Something else may take it in the
 * meantime, so its stamp is compared afterwards. Memory or a channel that is not in the object table, or not the same
 * afterwards, is not mapped or registered: no program names it so early, or frees it so late.
 *
 * A pod can have any number of tasks inside these functions, and a probe of a return watches a fixed number. So the
 * probes send the calls to functions of this module, which call the driver's. Going away: see uvm.c.
 */
#include <linux/hashtable.h>
#include <linux/list.h>
#include <linux/sched.h>
#include <linux/slab.h>
#include <linux/spinlock.h>
#include <linux/srcu.h>

#include "client.h"
#include "compat.h"
#include "probes.h"
#include "mem.h"
#include "nvrm.h"
#include "rm.h"
#include "uvm_mem.h"
#include "uvm_tables.h"

/* A duplicate of UVM. */
struct held {
	struct hlist_node node;
	unsigned long device;
	u32 handle;
	struct qgpu_pod *pod;		/* a reference; whose client it is of, or NULL */
	struct qgpu_mem *mem;		/* a reference, or NULL */
	struct qgpu_tables *tables;	/* a reference; of its mapping, or NULL */
	u64 tables_size;
};

/* A channel or an address space that UVM has registered. */
struct retained {
	struct hlist_node node;
	const void *name;		/* RM's, for what it keeps of it */
	struct qgpu_mem *mem;		/* a reference: what is charged for the channel's TSG, or for the space */
};

static DEFINE_SPINLOCK(held_lock);	/* protects what follows; taken before the locks of uvm_tables.c and mem.c */
static DEFINE_HASHTABLE(there, 14);	/* by handle */
static DEFINE_HASHTABLE(kept, 10);	/* struct retained, by RM's name */

static struct srcu_struct inside;	/* tasks in a function that a handler sent them to */

enum { DESTROY, SPACE, RELEASE, RETAIN, FREE, DUP, NR_PROBES };
static struct qgpu_probe probes[NR_PROBES];	/* each also the key of tasks that pass */

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
	drop_tables(held->tables, held->tables_size);
	if (held->pod)
		atomic_dec(&held->pod->nr_held);
	qgpu_pod_put(held->pod);
	kfree(held);
}

static const char mapping;	/* the key of tasks that have UVM map */

void qgpu_mapper_begin(struct qgpu_mapper *mapper, struct qgpu_tables *tables, u64 size)
{
	mapper->tables = tables;
	mapper->size = mapper->left = size;
	qgpu_pass_begin(&mapper->pass, &mapping);
}

void qgpu_mapper_end(struct qgpu_mapper *mapper)
{
	qgpu_pass_end(&mapper->pass);
	drop_tables(mapper->tables, mapper->left);
}

struct qgpu_mapper *qgpu_mapper_of_current(void)
{
	struct qgpu_pass *pass = qgpu_pass_of(&mapping);

	return pass ? container_of(pass, struct qgpu_mapper, pass) : NULL;
}

/*
 * A call can map for several cards, each by a duplicate with its own page tables; the room was reserved once. False:
 * there is no room for these.
 */
static bool take_tables(struct held *held)
{
	struct qgpu_mapper *mapper = qgpu_mapper_of_current();

	if (!mapper || !mapper->tables)
		return true;
	if (!mapper->left && qgpu_tables_add(mapper->tables, mapper->size))
		return false;
	held->tables = qgpu_tables_get(mapper->tables);
	held->tables_size = mapper->size;
	mapper->left = 0;
	return true;
}

/*
 * RM gives UVM what another pod shares with all, or what was made by a process with the number of this one. UVM passes
 * the caller's client on, and not its control file.
 */
static bool is_foreign(u32 client)
{
	struct qgpu_pod *pod = qgpu_pod_of_current();
	u64 of = pod ? qgpu_client_pod(client) : 0;
	bool foreign = of && of != pod->id;

	qgpu_pod_put(pod);
	return foreign;
}

/* NULL: it is refused, or there is no kernel memory. */
static struct held *held_new(unsigned long device, u32 client, u32 memory)
{
	struct held *held = kzalloc(sizeof(*held), GFP_KERNEL_ACCOUNT);
	struct qgpu_pod *pod = qgpu_client_owner(client);

	if (!held || (pod && !qgpu_pod_enter(&pod->nr_held))) {
		if (pod)
			atomic64_inc(&pod->refused_objects);
		qgpu_pod_put(pod);
		kfree(held);
		return NULL;
	}
	held->device = device;
	held->pod = pod;
	held->mem = qgpu_client_mem(client, memory);
	if (take_tables(held))
		return held;
	held_free(held);
	return NULL;
}

/* Its handle is RM's. */
static void held_made(struct held *held)
{
	if (!held->mem && !held->tables) {
		held_free(held);
		return;
	}
	spin_lock(&held_lock);
	hash_add(there, &held->node, held->handle);
	spin_unlock(&held_lock);
}

typedef u32 (*free_t)(unsigned long device, u32 handle);

static __nocfi u32 free_by_rm(unsigned long device, u32 handle)
{
	free_t driver = (free_t)qgpu_probed_function(&probes[FREE].at_call);
	struct qgpu_pass pass;
	u32 status;

	qgpu_pass_begin(&pass, &probes[FREE]);
	status = driver(device, handle);
	qgpu_pass_end(&pass);
	return status;
}

typedef u32 (*dup_t)(unsigned long device, u32 client, u32 memory, u32 *made, const struct nv_uvm_memory_info *info);

static __nocfi u32 dup_by_rm(unsigned long device, u32 client, u32 memory, u32 *made,
			     const struct nv_uvm_memory_info *info)
{
	dup_t driver = (dup_t)qgpu_probed_function(&probes[DUP].at_call);
	struct qgpu_pass pass;
	u32 status;

	qgpu_pass_begin(&pass, &probes[DUP]);
	status = driver(device, client, memory, made, info);
	qgpu_pass_end(&pass);
	return status;
}

/* After the duplicate was made. stamp: of before. */
static bool may_be_mapped(u32 client, u32 memory, u64 stamp, bool sysmem)
{
	if (sysmem && qgpu_rm_is_shared_page(client, memory))
		return false;
	return qgpu_client_stamp(client, memory) == stamp && (sysmem || stamp);
}

static u32 dup(unsigned long device, u32 client, u32 memory, u32 *made, const struct nv_uvm_memory_info *info)
{
	u64 stamp = qgpu_client_stamp(client, memory);
	struct held *held;
	u32 status;

	if (is_foreign(client))
		return NV_ERR_INVALID_CLIENT;
	held = held_new(device, client, memory);
	if (!held)
		return NV_ERR_NO_MEMORY;
	status = dup_by_rm(device, client, memory, made, info);
	if (status == NV_OK && held->pod && info && !may_be_mapped(client, memory, stamp, info->sysmem)) {
		free_by_rm(device, *made);
		status = NV_ERR_OBJECT_NOT_FOUND;
	}
	if (status != NV_OK) {
		held_free(held);
		return status;
	}
	held->handle = *made;
	held_made(held);
	return NV_OK;
}

static noinline u32 counted_dup(unsigned long device, u32 client, u32 memory, u32 *made,
				const struct nv_uvm_memory_info *info)
{
	int idx = srcu_read_lock(&inside);
	u32 status = dup(device, client, memory, made, info);

	srcu_read_unlock(&inside, idx);
	return status;
}

static int dup_called(struct kprobe *probe, struct pt_regs *regs)
{
	if (qgpu_passes(&probes[DUP]))
		return 0;
	instruction_pointer_set(regs, (unsigned long)counted_dup);
	return 1;
}

/* The duplicate of this handle, which no other call finds any more, or NULL. */
static struct held *take_out(unsigned long device, u32 handle)
{
	struct held *held, *found = NULL;

	spin_lock(&held_lock);
	hash_for_each_possible(there, held, node, handle) {
		if (held->handle == handle && held->device == device)
			found = held;
	}
	if (found)
		hash_del(&found->node);
	spin_unlock(&held_lock);
	return found;
}

static noinline u32 counted_free(unsigned long device, u32 handle)
{
	int idx = srcu_read_lock(&inside);
	struct held *held = take_out(device, handle);
	u32 status = free_by_rm(device, handle);

	if (held)
		held_free(held);
	srcu_read_unlock(&inside, idx);
	return status;
}

static int free_called(struct kprobe *probe, struct pt_regs *regs)
{
	if (qgpu_passes(&probes[FREE]))
		return 0;
	instruction_pointer_set(regs, (unsigned long)counted_free);
	return 1;
}

/* RM's name is free for another one as soon as RM has it back. */
static struct retained *take_retained_out(const void *name)
{
	struct retained *retained, *found = NULL;

	spin_lock(&held_lock);
	hash_for_each_possible(kept, retained, node, (unsigned long)name) {
		if (retained->name == name)
			found = retained;
	}
	if (found)
		hash_del(&found->node);
	spin_unlock(&held_lock);
	return found;
}

static void retained_free(struct retained *retained)
{
	if (retained)
		qgpu_mem_put(retained->mem);
	kfree(retained);
}

static void keep(struct retained *retained, const void *name)
{
	retained->name = name;
	spin_lock(&held_lock);
	hash_add(kept, &retained->node, (unsigned long)name);
	spin_unlock(&held_lock);
}

/* NULL: nothing is charged to a task in no pod; ERR_PTR: there is no room, or no kernel memory. */
static struct retained *charge_space(void)
{
	struct qgpu_pod *pod = qgpu_pod_of_current();
	struct retained *retained;

	if (!pod)
		return NULL;
	retained = kzalloc(sizeof(*retained), GFP_KERNEL_ACCOUNT);
	if (retained)
		retained->mem = qgpu_mem_new(pod, qgpu_pod_limited(pod), QGPU_SPACE_BYTES, GFP_KERNEL_ACCOUNT);
	qgpu_pod_put(pod);
	if (retained && !IS_ERR(retained->mem))
		return retained;
	kfree(retained);
	return ERR_PTR(-ENOMEM);
}

typedef void (*destroy_t)(void *space);

static __nocfi void destroy_by_rm(void *space)
{
	destroy_t driver = (destroy_t)qgpu_probed_function(&probes[DESTROY].at_call);
	struct qgpu_pass pass;

	qgpu_pass_begin(&pass, &probes[DESTROY]);
	driver(space);
	qgpu_pass_end(&pass);
}

typedef u32 (*space_t)(unsigned long device, u32 client, u32 handle, void **made, void *info);

static __nocfi u32 dup_space(unsigned long device, u32 client, u32 handle, void **made, void *info)
{
	space_t driver = (space_t)qgpu_probed_function(&probes[SPACE].at_call);
	struct retained *retained;
	struct qgpu_pass pass;
	u32 status;

	if (is_foreign(client))
		return NV_ERR_INVALID_CLIENT;
	retained = charge_space();
	if (IS_ERR(retained))
		return NV_ERR_NO_MEMORY;
	qgpu_pass_begin(&pass, &probes[SPACE]);
	status = driver(device, client, handle, made, info);
	qgpu_pass_end(&pass);
	if (status == NV_OK && is_foreign(client)) {	/* it has got the handle meanwhile */
		destroy_by_rm(*made);
		status = NV_ERR_INVALID_CLIENT;
	}
	if (status == NV_OK && retained)
		keep(retained, *made);
	else
		retained_free(retained);
	return status;
}

static noinline u32 counted_space(unsigned long device, u32 client, u32 handle, void **made, void *info)
{
	int idx = srcu_read_lock(&inside);
	u32 status = dup_space(device, client, handle, made, info);

	srcu_read_unlock(&inside, idx);
	return status;
}

static int space_called(struct kprobe *probe, struct pt_regs *regs)
{
	if (qgpu_passes(&probes[SPACE]))
		return 0;
	instruction_pointer_set(regs, (unsigned long)counted_space);
	return 1;
}

static noinline void counted_destroy(void *space)
{
	int idx = srcu_read_lock(&inside);
	struct retained *retained = take_retained_out(space);

	destroy_by_rm(space);
	retained_free(retained);
	srcu_read_unlock(&inside, idx);
}

static int destroy_called(struct kprobe *probe, struct pt_regs *regs)
{
	if (qgpu_passes(&probes[DESTROY]))
		return 0;
	instruction_pointer_set(regs, (unsigned long)counted_destroy);
	return 1;
}

typedef void (*release_t)(void *channel);

static __nocfi void release(void *channel)
{
	release_t driver = (release_t)qgpu_probed_function(&probes[RELEASE].at_call);
	struct qgpu_pass pass;

	qgpu_pass_begin(&pass, &probes[RELEASE]);
	driver(channel);
	qgpu_pass_end(&pass);
}

static noinline void counted_release(void *channel)
{
	int idx = srcu_read_lock(&inside);
	struct retained *retained = take_retained_out(channel);

	release(channel);
	retained_free(retained);
	srcu_read_unlock(&inside, idx);
}

static int release_called(struct kprobe *probe, struct pt_regs *regs)
{
	if (qgpu_passes(&probes[RELEASE]))
		return 0;
	instruction_pointer_set(regs, (unsigned long)counted_release);
	return 1;
}

typedef u32 (*retain_t)(void *space, u32 client, u32 channel, void **made, void *info);

static __nocfi u32 retain_by_rm(void *space, u32 client, u32 channel, void **made, void *info)
{
	retain_t driver = (retain_t)qgpu_probed_function(&probes[RETAIN].at_call);
	struct qgpu_pass pass;
	u32 status;

	qgpu_pass_begin(&pass, &probes[RETAIN]);
	status = driver(space, client, channel, made, info);
	qgpu_pass_end(&pass);
	return status;
}

/* Consumes what it is given unless RM has retained the channel, and the same one. */
static u32 retain_charged(struct retained *retained, u64 stamp, void *space, u32 client, u32 channel, void **made,
			  void *info)
{
	u32 status = retain_by_rm(space, client, channel, made, info);

	if (status == NV_OK && qgpu_client_stamp(client, channel) != stamp) {
		release(*made);
		status = NV_ERR_OBJECT_NOT_FOUND;
	}
	if (status != NV_OK) {
		retained_free(retained);
		return status;
	}
	keep(retained, *made);
	return NV_OK;
}

/* RM alone decides about a client that is in no pod or older than the module. */
static u32 retain(void *space, u32 client, u32 channel, void **made, void *info)
{
	u64 stamp = qgpu_client_stamp(client, channel);
	struct retained *retained;

	if (!qgpu_client_pod(client))
		return retain_by_rm(space, client, channel, made, info);
	if (is_foreign(client))
		return NV_ERR_INVALID_CLIENT;
	if (!stamp)
		return NV_ERR_OBJECT_NOT_FOUND;
	retained = kzalloc(sizeof(*retained), GFP_KERNEL_ACCOUNT);
	if (!retained)
		return NV_ERR_NO_MEMORY;
	retained->mem = qgpu_client_tsg_mem(client, channel);
	return retain_charged(retained, stamp, space, client, channel, made, info);
}

static noinline u32 counted_retain(void *space, u32 client, u32 channel, void **made, void *info)
{
	int idx = srcu_read_lock(&inside);
	u32 status = retain(space, client, channel, made, info);

	srcu_read_unlock(&inside, idx);
	return status;
}

static int retain_called(struct kprobe *probe, struct pt_regs *regs)
{
	if (qgpu_passes(&probes[RETAIN]))
		return 0;
	instruction_pointer_set(regs, (unsigned long)counted_retain);
	return 1;
}

/* What ends something comes before what makes it. */
static struct qgpu_probe probes[NR_PROBES] = {
	[DESTROY] = { .symbol = "nvidia:nvUvmInterfaceAddressSpaceDestroy", .called = destroy_called, .redirects = true },
	[SPACE] = { .symbol = "nvidia:nvUvmInterfaceDupAddressSpace", .called = space_called, .redirects = true },
	[RELEASE] = { .symbol = "nvidia:nvUvmInterfaceReleaseChannel", .called = release_called, .redirects = true },
	[RETAIN] = { .symbol = "nvidia:nvUvmInterfaceRetainChannel", .called = retain_called, .redirects = true },
	[FREE] = { .symbol = "nvidia:nvUvmInterfaceFreeDupedHandle", .called = free_called, .redirects = true },
	[DUP] = { .symbol = "nvidia:nvUvmInterfaceDupMemory", .called = dup_called, .redirects = true },
};

static struct qgpu_probes set = { "memory that UVM holds", probes, ARRAY_SIZE(probes) };

int qgpu_uvm_mem_init(void)
{
	return init_srcu_struct(&inside);
}

void qgpu_uvm_mem_uninit(void)
{
	cleanup_srcu_struct(&inside);
}

bool qgpu_uvm_mem_counted(void)
{
	return qgpu_probes_work(&set);
}

unsigned long qgpu_uvm_mem_missed(void)
{
	return qgpu_probes_missed(&set);
}

/* A pod can have UVM hold very much: lets others run. Nothing else uses the tables by then, so no lock is held. */
static void forget_all(void)
{
	struct retained *retained;
	struct hlist_node *next;
	struct held *held;
	int bucket;

	hash_for_each_safe(there, bucket, next, held, node) {
		hash_del(&held->node);
		held_free(held);
		cond_resched();
	}
	hash_for_each_safe(kept, bucket, next, retained, node) {
		hash_del(&retained->node);
		retained_free(retained);
		cond_resched();
	}
}

/* The probes are gone. */
static void clear(void)
{
	synchronize_srcu(&inside);
	synchronize_rcu_tasks();
	forget_all();
}

/* If one of the probes cannot be placed, others have been there for a moment. */
void qgpu_uvm_mem_start(void)
{
	if (!set.placed && qgpu_probes_place(&set))
		clear();
}

void qgpu_uvm_mem_stop(void)
{
	qgpu_probes_remove(&set);
	clear();
}
