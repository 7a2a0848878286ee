// SPDX-License-Identifier: GPL-2.0
/*
 * export.c - memory that a client exports by a descriptor or to the fabric, and memory that a client imports by a
 * descriptor.
 *
 * Exported memory outlives its handle and its client, and the module does not see when it is freed. So it stays charged
 * until the pod has no open file of the driver. While calls are not sealed, all that is charged for the client does.
 * rules.h says which controls export, and where they name the memory.
 *
 * An import is compared with what the pod itself has exported; RM can tell whether two handles are the same memory. The
 * same memory is charged once. An import without a match (another pod exported it, or the exporter freed its handle) is
 * charged as the pod's own. Otherwise it would be charged to no pod after the other pod ends.
 */
#include <linux/sched.h>
#include <linux/sched/signal.h>
#include <linux/slab.h>
#include <linux/uaccess.h>

#include "client.h"
#include "dup.h"
#include "export.h"
#include "mem.h"
#include "rm.h"
#include "toctou.h"
#include "vram_heap.h"

/*
 * RM duplicates an object of any class that can be duplicated, into a client of its own. So a TSG would keep its context
 * buffers, and an address space its page tables, when the handle that is charged for them has gone.
 */
static bool may_be_exported(u32 class)
{
	switch (class) {
	case NV01_MEMORY_LOCAL_USER:
	case NV01_MEMORY_SYSTEM:
	case NV01_MEMORY_SYSTEM_OS_DESCRIPTOR:
	case NV_MEMORY_FABRIC:
	case NV_MEMORY_MULTICAST_FABRIC:
		return true;
	}
	return false;
}

static bool names_only_memory(struct qgpu_client *client, const u32 *handles, u32 nr)
{
	u32 i, class, status;

	for (i = 0; i < nr; i++) {
		if (!handles[i])
			continue;	/* RM skips it, or refuses it */
		status = qgpu_rm_class(client->handle, handles[i], &class);
		if (status == NV_OK ? !may_be_exported(class) : !qgpu_rm_says_gone(status))
			return false;
		cond_resched();
	}
	return true;
}

static bool is_by_descriptor(const struct qgpu_call *call)
{
	u32 cmd = call->in.control.cmd;

	return cmd == NV0000_OS_UNIX_EXPORT_OBJECT_TO_FD || cmd == NV0000_OS_UNIX_EXPORT_OBJECTS_TO_FD;
}

/*
 * RM keeps what all processes of the host export in one table of 524,287 places, and goes through all of them if none is
 * free. When a file is closed, RM frees all that was exported by it with its lock held. The guardian has the same bound.
 */
#define EXPORTS_MAX (1 << 14)

/*
 * An export that replaces another one of the file counts beside it until the file is closed. A removed pod may export
 * any number.
 */
static bool take_places(struct qgpu_call *call, const u32 *handles, u32 nr)
{
	atomic_t *taken = &call->pod->nr_exports;
	u32 i;

	for (i = 0; i < nr && is_by_descriptor(call); i++)
		call->nr_exports += !!handles[i];
	if (atomic_add_return(call->nr_exports, taken) <= EXPORTS_MAX || READ_ONCE(call->pod->gone))
		return true;
	atomic_sub(call->nr_exports, taken);
	return false;
}

/* Without a seal it is not known whether RM has exported anything, nor by which file: the places stay taken. */
static void give_back_places(struct qgpu_call *call)
{
	if (call->sealed && call->out.control.status != NV_OK && !call->noted)
		atomic_sub(call->nr_exports, &call->pod->nr_exports);
}

/* handles: what the call names. */
static long export_locked(struct qgpu_call *call, struct qgpu_client *client, const u32 *handles, u32 nr)
{
	struct qgpu_object *object;
	u32 i, gpus = 0;
	long ret;

	if (!names_only_memory(client, handles, nr))
		return qgpu_refuse_alloc(call, offsetof(struct nvos54, status), NV_ERR_NOT_SUPPORTED);
	if (!take_places(call, handles, nr)) {
		atomic64_inc(&call->pod->refused_objects);
		return qgpu_call_answer(call, offsetof(struct nvos54, status), NV_ERR_INSUFFICIENT_RESOURCES);
	}
	if (!qgpu_toctou_sealed())
		qgpu_objects_export(client, true);
	for (i = 0; i < nr; i++) {
		object = qgpu_object_find(client, handles[i]);
		if (object && qgpu_is_memory(object->class))
			gpus |= qgpu_mem_export(client, object);
	}
	call->exports = gpus;
	ret = qgpu_call_forward(call);
	give_back_places(call);
	return ret;
}

long qgpu_export(struct qgpu_call *call, u32 memory_at)
{
	struct qgpu_client *client = qgpu_client_lock(call->in.control.client, call->pod);
	u32 size = memory_at ? memory_at + sizeof(u32) : sizeof(struct nv0000_export_objects);
	struct nv0000_export_objects *many;
	void *params;
	long ret;

	if (IS_ERR(client))
		return PTR_ERR(client);
	if (!client)
		return qgpu_call_forward(call);
	params = many = kmalloc(size, GFP_KERNEL_ACCOUNT);
	if (params)
		qgpu_call_look(call, call->in.control.params, params, size);
	if (!params)
		ret = qgpu_call_answer(call, offsetof(struct nvos54, status), NV_ERR_NO_MEMORY);
	else if (memory_at)
		ret = export_locked(call, client, params + memory_at, 1);
	else
		ret = export_locked(call, client, many->objects, min_t(u32, many->num, NV_EXPORTS_MAX));
	qgpu_client_unlock(client);
	kfree(params);
	return ret;
}

/* RM compares two handles of one client, so the other memory gets a handle in this client during the comparison. */
static bool is_same(const struct qgpu_arrival *arrival, const struct qgpu_export *other)
{
	u32 client = arrival->client->handle, handle = 0;
	struct qgpu_mem *mem = qgpu_client_mem(other->client, other->handle);
	bool same;

	qgpu_mem_put(mem);	/* it is needed for the comparison only */
	if (mem != other->mem ||
	    qgpu_rm_dup(client, arrival->parent, &handle, other->client, other->handle) != NV_OK)
		return false;
	same = qgpu_rm_is_duplicate(client, arrival->handle, handle);
	qgpu_rm_free(client, arrival->parent, handle);
	return same;
}

/*
 * An import is compared with at most this many exports, and all imports of a call with so many together; each comparison
 * asks RM three times. Without a match among them an import is charged as new.
 */
#define COMPARED_MAX		64
#define COMPARED_BY_CALL	1024

/* left: how many comparisons the call may still make. */
static struct qgpu_mem *find_exported(const struct qgpu_arrival *arrival, void *about)
{
	struct qgpu_export *exports;
	struct qgpu_mem *found = NULL;
	int i, n, *left = about;

	if (!arrival->gpus)
		return NULL;
	exports = kcalloc(COMPARED_MAX, sizeof(*exports), GFP_KERNEL_ACCOUNT);
	if (!exports)
		return NULL;
	n = qgpu_mem_exports(arrival->client->pod, arrival->gpus, arrival->size, exports, COMPARED_MAX);
	for (i = 0; i < n; i++) {
		if (!found && (*left)-- > 0 && !fatal_signal_pending(current) && is_same(arrival, &exports[i]))
			found = exports[i].mem;
		else
			qgpu_mem_put(exports[i].mem);
	}
	kfree(exports);
	return found;
}

/* Both forms of the control. */
union imports {
	struct nv0000_import_object one;
	struct nv0000_import_objects many;
};

struct importing {
	union imports imports;
	struct qgpu_mem *spares[NV_IMPORTS_MAX];
	/* places whose handle was in use before: RM imports nothing over an object */
	DECLARE_BITMAP(taken, NV_IMPORTS_MAX);
};

static bool are_many(const struct qgpu_call *call)
{
	return call->in.control.cmd == NV0000_OS_UNIX_IMPORT_OBJECTS_FROM_FD;
}

/* The next handle that the call names, starting at place *i; 0: there is none. RM looks at the first places only. */
static u32 next_import(const struct qgpu_call *call, const union imports *imports, int *i)
{
	int n = are_many(call) ? min_t(int, imports->many.num, NV_IMPORTS_MAX) : 1;

	while (*i < n) {
		u32 handle = are_many(call) ? imports->many.objects[*i] : imports->one.object;

		(*i)++;
		if (handle)
			return handle;
	}
	return 0;
}

/*
 * RM skips places without an export, and if a later one fails it frees what stands in all places before. So no handle
 * may be in use.
 */
static bool imports_over(const struct qgpu_call *call, struct qgpu_client *client, const union imports *imports)
{
	u32 handle;
	int i = 0;

	while ((handle = next_import(call, imports, &i)))
		if (qgpu_object_find(client, handle) || qgpu_rm_has(client->handle, handle))
			return true;
	return false;
}

/* Without a seal the pod may name other handles after imports_over(). */
static void note_taken(const struct qgpu_call *call, struct qgpu_client *client, struct importing *importing)
{
	u32 handle;
	int i = 0;

	while ((handle = next_import(call, &importing->imports, &i)))
		if (qgpu_object_find(client, handle))
			set_bit(i - 1, importing->taken);
}

static void put_spares(struct qgpu_mem **spares)
{
	int i;

	for (i = 0; i < NV_IMPORTS_MAX; i++)
		qgpu_mem_put(spares[i]);
}

/* One for each handle that the call can name. */
static bool make_spares(const struct qgpu_call *call, struct qgpu_mem **spares)
{
	int i, n = are_many(call) ? NV_IMPORTS_MAX : 1;

	for (i = 0; i < n; i++) {
		spares[i] = qgpu_mem_new(call->pod, 0, 0, GFP_KERNEL_ACCOUNT);
		if (IS_ERR(spares[i])) {
			spares[i] = NULL;
			return false;
		}
	}
	return true;
}

/* Whether RM found no export for a place. Without a seal the pod may have written the answer. */
static bool is_empty(const struct qgpu_call *call, const union imports *imports, int place)
{
	return call->sealed && are_many(call) && !imports->many.types[place];
}

static u32 book_imports(struct qgpu_call *call, struct qgpu_client *client, const struct importing *importing,
			u32 parent)
{
	struct qgpu_arrival arrival = { client, parent, .lies_on = -1 };
	int i = 0, nr = 0, left = COMPARED_BY_CALL;
	u32 status = NV_OK;

	while (status == NV_OK && (arrival.handle = next_import(call, &importing->imports, &i))) {
		if (test_bit(i - 1, importing->taken) || is_empty(call, &importing->imports, i - 1))
			continue;
		arrival.gpus = call->carried;
		arrival.spare = importing->spares[nr++];
		status = qgpu_arrive(call, &arrival, find_exported, &left);
		cond_resched();
	}
	return status;
}

/* All or none, as in RM. */
static void undo_imports(struct qgpu_call *call, struct qgpu_client *client, const struct importing *importing,
			 u32 parent)
{
	struct qgpu_object *object;
	u32 handle;
	int i = 0;

	while ((handle = next_import(call, &importing->imports, &i))) {
		object = qgpu_object_find(client, handle);
		if (test_bit(i - 1, importing->taken))
			continue;
		if (object && !qgpu_is_memory(object->class))
			continue;	/* without a seal the answer may not be RM's */
		qgpu_take_back(client, parent, handle);
		if (object)
			qgpu_objects_remove(client, handle);
	}
}

static long import_locked(struct qgpu_call *call, struct qgpu_client *client, struct importing *importing, u32 size)
{
	union imports *imports = &importing->imports;
	u32 parent, handle, status;
	int i = 0;
	long ret;

	if (imports_over(call, client, imports))
		return qgpu_call_answer(call, offsetof(struct nvos54, status), NV_ERR_INSERT_DUPLICATE_NAME);
	ret = qgpu_call_forward(call);
	if (!call->sealed && copy_from_user(imports, (void __user *)(uintptr_t)call->params_at, size))
		return ret;
	parent = (are_many(call) ? imports->many.parent : imports->one.parent) ?: client->handle;
	if (call->out.control.status != NV_OK) {
		while ((handle = next_import(call, imports, &i)))
			qgpu_free_unsaid(call, call->out.control.status, client, parent, handle);
		return ret;
	}
	note_taken(call, client, importing);
	status = book_imports(call, client, importing, parent);
	if (status == NV_OK)
		return ret;
	undo_imports(call, client, importing, parent);
	return qgpu_call_answer(call, offsetof(struct nvos54, status), status) ?: ret;
}

long qgpu_import(struct qgpu_call *call)
{
	struct qgpu_client *client = qgpu_client_lock_to_take(call->in.control.client, call->pod, NV_IMPORTS_MAX);
	u32 size = are_many(call) ? sizeof(struct nv0000_import_objects) : sizeof(struct nv0000_import_object);
	struct importing *importing;
	long ret;

	if (IS_ERR(client))
		return PTR_ERR(client);
	if (!client)
		return qgpu_call_forward(call);
	importing = kzalloc(sizeof(*importing), GFP_KERNEL_ACCOUNT);
	if (importing && make_spares(call, importing->spares)) {
		qgpu_call_look(call, call->in.control.params, &importing->imports, size);
		ret = import_locked(call, client, importing, size);
	} else {
		ret = qgpu_call_answer(call, offsetof(struct nvos54, status), NV_ERR_NO_MEMORY);
	}
	qgpu_client_unlock(client);
	if (importing)
		put_spares(importing->spares);
	kfree(importing);
	return ret;
}
