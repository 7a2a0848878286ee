// SPDX-License-Identifier: GPL-2.0
/*
 * rm.c - clients and objects as the resource manager keeps them: handles are a client's own, freeing takes the subtree,
 * a client belongs to the file it was made on, a Device needs its card's file to be open. What lies on a card is
 * memory.c's.
 */
#include <linux/fdtable.h>
#include <linux/file.h>
#include <linux/module.h>
#include <linux/slab.h>

#include "sim.h"

#define NV_ERR_INSUFFICIENT_RESOURCES	0x1a
/* What a TSG takes of the card besides its channels. */
#define COMPUTE_TSG_BYTES		(10 << 20)
#define OTHER_TSG_BYTES			(1 << 20)
#define SPACE_BYTES			(64 << 10)	/* of an address space; a device's comes when it is used, here never */

DEFINE_MUTEX(sim_lock);
unsigned int sim_nr_clients, sim_nr_objects, sim_nr_waits, sim_nr_strays;
static LIST_HEAD(clients);
static u32 last_client = 0xc1d00000, last_handle = 0xcaf00000;

/* The handle of the next client, for one that is given again; 0: a new one. */
static u32 next_client;
module_param(next_client, uint, 0644);

/* Whether channels get a graphics context of RM's own, below their TSG and by a handle that RM chooses. */
static bool contexts;
module_param(contexts, bool, 0644);

/* rmclientValidate_IMPL: by file, unless the caller is the kernel. */
struct sim_client *sim_client(u32 handle, const struct sim_file *file)
{
	struct sim_client *client;

	list_for_each_entry(client, &clients, node) {
		if (client->handle == handle)
			return !file || client->owner == (file->control ?: file) ? client : NULL;
	}
	return NULL;
}

struct sim_object *sim_object(struct sim_client *client, u32 handle)
{
	return xa_load(&client->objects, handle);
}

static int is_card(const void *minor, struct file *filp, unsigned int fd)
{
	const struct sim_file *file = filp->private_data;

	/* nv.c:nv_match_dev_state: the table's identity from 550.40.07 on, the major before */
	if (sim_major >= 550 ? filp->f_op != sim_fops : MAJOR(file_inode(filp)->i_rdev) != NV_MAJOR_DEVICE_NUMBER)
		return 0;
	return file->minor == *(const u32 *)minor;
}

static u32 alloc_tsg(struct sim_client *client, struct sim_object *object, u32 engine)
{
	struct sim_tsg *tsg = kzalloc(sizeof(*tsg), GFP_KERNEL);

	if (!tsg)
		return NV_ERR_NO_MEMORY;
	object->mem = sim_mem_new(object->gpu, !engine || NV_IS_COMPUTE(engine) ? COMPUTE_TSG_BYTES : OTHER_TSG_BYTES);
	if (!object->mem) {
		kfree(tsg);
		return NV_ERR_NO_MEMORY;
	}
	INIT_LIST_HEAD(&tsg->channels);
	tsg->handles = 1;
	tsg->slice_ns = NV_DEFAULT_TIMESLICE_US * 1000ull;
	tsg->client = client->handle;
	tsg->handle = object->handle;
	object->tsg = tsg;
	sim_gpu_add_tsg(object->gpu, tsg, engine);
	return NV_OK;
}

/* kernel_graphics_context.c */
static u32 add_context(struct sim_client *client, struct sim_object *channel)
{
	struct sim_object *context;
	u32 handle = 0, status;

	if (!contexts)
		return NV_OK;
	status = sim_insert(client, channel->parent, &handle, KERNEL_GRAPHICS_CONTEXT, &context);
	if (status)
		return status;
	context->gpu = channel->gpu;
	channel->vaspace = handle;
	return NV_OK;
}

#define WRITTEN XA_MARK_1	/* named by a TSG or channel */

/* Where the parameters are shorter, the rest is none. */
static void look_at_written(const struct sim_file *file, struct sim_client *client, struct sim_object *object, u64 params)
{
	static const u32 of_tsg[SIM_WRITTEN] = { 0, 4 }, of_channel[SIM_WRITTEN] = { 0, 140, 32 };
	const u32 *at = object->class == KEPLER_CHANNEL_GROUP_A ? of_tsg : of_channel;
	int i;

	for (i = 0; params && i < SIM_WRITTEN; i++) {
		if (sim_copy_in(file, &object->written[i], params + at[i], sizeof(u32)))
			object->written[i] = 0;
		xa_set_mark(&client->objects, object->written[i], WRITTEN);
	}
}

static u32 alloc_channel(const struct sim_file *file, struct sim_client *client, struct sim_object *object,
			 struct sim_object *parent, u64 params)
{
	struct sim_object *memory;
	u32 status, userd, engine = 0;

	if (object->gpu < 0)
		return NV_ERR_INVALID_OBJECT_PARENT;
	if (params)
		sim_copy_in(file, &engine, params + NV_CHANNEL_PARAMS_ENGINE_AT, sizeof(engine));
	if (parent->class != KEPLER_CHANNEL_GROUP_A) {
		status = alloc_tsg(client, object, engine);
		if (status)
			return status;
	} else {
		object->tsg = parent->tsg;
	}
	if (sim_gpu_channels(object->gpu) >= SIM_CHANNELS_MAX)
		return NV_ERR_INSUFFICIENT_RESOURCES;
	object->channel = kzalloc(sizeof(*object->channel), GFP_KERNEL);
	if (!object->channel)
		return NV_ERR_NO_MEMORY;
	list_add_tail(&object->channel->node, &object->tsg->channels);
	look_at_written(file, client, object, params);
	userd = object->written[2];
	memory = userd ? sim_object(client, userd) : NULL;
	if (memory && memory->class == NV01_MEMORY_SYSTEM_OS_DESCRIPTOR)	/* kernel_channel_gv100.c */
		object->userd = userd;
	return add_context(client, object);
}

static u32 construct(const struct sim_file *file, struct sim_client *client, struct sim_object *object, u64 params)
{
	struct sim_object *parent = sim_object(client, object->parent);
	u32 instance = 0, tsg[4] = { 0 };	/* ..., ..., vaspace, engine */

	if (object->class == NV01_DEVICE_0) {
		if (params && sim_copy_in(file, &instance, params, sizeof(instance)))
			return NV_ERR_INVALID_ARGUMENT;
		if (instance >= sim_nr_gpus)
			return NV_ERR_INVALID_ARGUMENT;
		if (file && !iterate_fd(current->files, 0, is_card, &instance))
			return NV_ERR_INSUFFICIENT_PERMISSIONS;
		object->gpu = instance;
		return NV_OK;
	}
	if (object->parent != client->handle && !parent)
		return NV_ERR_INVALID_OBJECT_PARENT;
	object->gpu = parent ? parent->gpu : -1;
	if (object->class == FERMI_VASPACE_A && object->gpu >= 0) {
		object->mem = sim_mem_new(object->gpu, SPACE_BYTES);
		return object->mem ? NV_OK : NV_ERR_NO_MEMORY;
	}
	if (object->class == NV01_MEMORY_LOCAL_USER)
		return sim_alloc_video(file, object, params);
	if (object->class == NV50_MEMORY_VIRTUAL)
		return sim_alloc_space(file, object, params);
	if (object->class == RM_USER_SHARED_DATA && object->gpu >= 0) {
		object->mem = sim_mem_new(object->gpu, 0);
		if (object->mem)
			object->mem->class = RM_USER_SHARED_DATA;
		return object->mem ? NV_OK : NV_ERR_NO_MEMORY;
	}
	if (object->class == KEPLER_CHANNEL_GROUP_A && params)
		sim_copy_in(file, tsg, params, sizeof(tsg));
	object->vaspace = tsg[2];
	if (object->class == KEPLER_CHANNEL_GROUP_A)
		look_at_written(file, client, object, params);
	if (object->class == KEPLER_CHANNEL_GROUP_A)
		return parent && parent->class == NV01_DEVICE_0 ? alloc_tsg(client, object, tsg[3]) :
								 NV_ERR_INVALID_OBJECT_PARENT;
	if (object->class == NV01_EVENT_OS_EVENT)	/* event.c: of any client */
		return !params || sim_copy_in(file, &instance, params, sizeof(instance)) || !instance ||
				       sim_client(instance, NULL) ?
			       NV_OK :
			       NV_ERR_OBJECT_NOT_FOUND;
	if (object->class == NV_SEMAPHORE_SURFACE)
		return sim_hold_memory(file, client, params);
	if (object->class == NV_MEMORY_FABRIC)
		return sim_put_on_fabric(file, client, object, params);
	if (NV_IS_GPFIFO(object->class))
		return parent ? alloc_channel(file, client, object, parent, params) : NV_ERR_INVALID_OBJECT_PARENT;
	if (object->class == 0x73)	/* no display, as on the recorded card */
		return NV_ERR_NOT_SUPPORTED;
	return NV_OK;
}

/* Another handle on the TSG; there is one. */
static void rename(struct sim_tsg *tsg)
{
	struct sim_client *client;
	struct sim_object *object;
	unsigned long index;

	list_for_each_entry(client, &clients, node) {
		xa_for_each(&client->objects, index, object) {
			if (object->tsg == tsg && !object->channel) {
				tsg->client = client->handle;
				tsg->handle = object->handle;
				return;
			}
		}
	}
	WARN_ON(1);
}

/* kernel_channel_group_api.c: the last handle takes the TSG with it; channels are below a handle each. */
static void drop_tsg(struct sim_client *client, struct sim_object *object)
{
	struct sim_tsg *tsg = object->tsg;

	if (--tsg->handles) {
		if (tsg->client == client->handle && tsg->handle == object->handle)
			rename(tsg);
		return;
	}
	sim_gpu_remove_tsg(object->gpu, tsg);
	kfree(tsg);
}

/* vidmemPmaFree: the memory is the next one's, whatever the card writes there. */
static bool is_written(struct sim_client *client, u32 memory)
{
	struct sim_object *object;
	unsigned long index;
	int i;

	xa_for_each(&client->objects, index, object) {
		for (i = 0; i < SIM_WRITTEN; i++) {
			if (object->written[i] == memory && !object->doomed)
				return true;
		}
	}
	return false;
}

void sim_destroy(struct sim_client *client, struct sim_object *object)
{
	const struct sim_tsg *tsg = object->tsg;
	/* made for this channel, which may not have come to be */
	bool hidden = tsg && tsg->client == client->handle && tsg->handle == object->handle;

	sim_nr_strays += xa_get_mark(&client->objects, object->handle, WRITTEN) && is_written(client, object->handle);
	xa_erase(&client->objects, object->handle);
	sim_mem_put(object->mem);
	if (object->channel) {
		sim_gpu_advance(object->gpu);
		if (object->channel->disabled && object->channel->left)
			sim_nr_waits++;	/* the real one would wait here until the channel runs dry, or time out */
		list_del(&object->channel->node);
		kfree(object->channel);
	}
	if (tsg && (hidden || object->class == KEPLER_CHANNEL_GROUP_A))
		drop_tsg(client, object);
	kfree(object);
	sim_nr_objects--;
}

u32 sim_insert(struct sim_client *client, u32 parent, u32 *handle, u32 class, struct sim_object **ret)
{
	struct sim_object *object;

	if (!*handle)
		*handle = ++last_handle;
	if (*handle == client->handle || *handle == parent || sim_object(client, *handle))
		return NV_ERR_INSERT_DUPLICATE_NAME;
	object = kzalloc(sizeof(*object), GFP_KERNEL);
	if (!object)
		return NV_ERR_NO_MEMORY;
	object->handle = *handle;
	object->parent = parent;
	object->class = class;
	object->gpu = -1;
	if (xa_err(xa_store(&client->objects, *handle, object, GFP_KERNEL))) {
		kfree(object);
		return NV_ERR_NO_MEMORY;
	}
	sim_nr_objects++;
	*ret = object;
	return NV_OK;
}

static u32 free_handle(void)
{
	do {
		last_client++;
	} while (sim_client(last_client, NULL));	/* chosen by a caller */
	return last_client;
}

/* rs_server.c:serverAllocClient: the root is the handle that the caller chooses; 0: RM does. */
static u32 alloc_client(struct sim_file *file, u32 root, u32 *handle)
{
	struct sim_client *client;

	if (sim_client(root, NULL))
		return NV_ERR_INSERT_DUPLICATE_NAME;
	client = kzalloc(sizeof(*client), GFP_KERNEL);
	if (!client)
		return NV_ERR_NO_MEMORY;
	xa_init(&client->objects);
	client->handle = root ?: next_client ?: free_handle();
	if (!root)
		next_client = 0;
	client->owner = file->control ?: file;
	list_add(&client->node, &clients);
	sim_nr_clients++;
	*handle = client->handle;
	return NV_OK;
}

/* alloc_free.c:serverAllocApiCopyOut: where the parameters cannot be written back RM says so, and what it made stays. */
static u32 write_back(const struct sim_file *file, u64 params)
{
	u32 first;

	if (!params || (!sim_copy_in(file, &first, params, sizeof(first)) &&
			!sim_copy_out(file, params, &first, sizeof(first))))
		return NV_OK;
	return NV_ERR_INVALID_ADDRESS;
}

u32 sim_alloc(struct sim_file *file, u32 root, u32 parent, u32 *handle, u32 class, u64 params)
{
	struct sim_client *client;
	struct sim_object *object;
	u32 status, first;

	if (params && sim_copy_in(file, &first, params, sizeof(first)))	/* serverAllocApiCopyIn() */
		return NV_ERR_INVALID_ADDRESS;
	if (class == NV01_ROOT || class == NV01_ROOT_NON_PRIV || class == NV01_ROOT_CLIENT) {
		if (file->minor != NV_MINOR_CONTROL)
			return NV_ERR_INVALID_ARGUMENT;
		return alloc_client(file, root, handle) ?: write_back(file, params);
	}
	client = sim_client(root, file);
	if (!client)
		return NV_ERR_INVALID_CLIENT;
	parent = parent ?: root;
	status = sim_insert(client, parent, handle, class, &object);
	if (status)
		return status;
	status = construct(file, client, object, params);
	if (!status)
		return write_back(file, params);
	sim_destroy(client, object);
	return status;
}

static bool is_below(struct sim_client *client, struct sim_object *object, u32 handle)
{
	int depth;

	if (handle == client->handle)	/* whatever the chain of parents says */
		return true;
	/* a handle can be given out again below what hung from it: then the chain of parents is a ring */
	for (depth = 0; object && depth < 32; depth++, object = sim_object(client, object->parent)) {
		if (object->handle == handle || object->parent == handle || (object->vaspace && object->vaspace == handle) ||
		    (object->userd && object->userd == handle))
			return true;
	}
	return false;
}

static void destroy_below(struct sim_client *client, u32 handle)
{
	struct sim_object *object;
	unsigned long index;

	xa_for_each(&client->objects, index, object)
		object->doomed = is_below(client, object, handle);
	xa_for_each(&client->objects, index, object) {
		if (object->doomed && object->channel)
			sim_destroy(client, object);
	}
	xa_for_each(&client->objects, index, object) {
		if (object->doomed)
			sim_destroy(client, object);
	}
}

static void destroy_client(struct sim_client *client)
{
	destroy_below(client, client->handle);
	sim_mem_put(client->tables);
	list_del(&client->node);
	xa_destroy(&client->objects);
	kfree(client);
	sim_nr_clients--;
}

u32 sim_free(const struct sim_file *file, struct nvos00 *arg)
{
	struct sim_client *client = sim_client(arg->root, file);

	if (!client)
		return NV_ERR_INVALID_CLIENT;
	if (arg->object == client->handle)
		destroy_client(client);
	else if (sim_object(client, arg->object))
		destroy_below(client, arg->object);
	/* the recorded driver answers OK for a handle that is not there */
	return NV_OK;
}

u32 sim_dup(const struct sim_file *file, struct nvos55 *arg)
{
	struct sim_client *client = sim_client(arg->client, file), *from = sim_client(arg->client_src, NULL);
	struct sim_object *source = from ? sim_object(from, arg->object_src) : NULL, *object;
	u32 status;

	if (!client)
		return NV_ERR_INVALID_CLIENT;
	if (!source)
		return NV_ERR_OBJECT_NOT_FOUND;
	status = sim_insert(client, arg->parent, &arg->object, source->class, &object);
	if (status)
		return status;
	object->gpu = source->gpu;
	object->mem = source->mem;
	if (object->mem)
		object->mem->refs++;
	if (source->class == KEPLER_CHANNEL_GROUP_A && source->tsg) {
		object->tsg = source->tsg;
		object->tsg->handles++;
	}
	return NV_OK;
}

void sim_close(struct sim_file *file)
{
	struct sim_client *client, *next;

	mutex_lock(&sim_lock);
	list_for_each_entry_safe(client, next, &clients, node) {
		if (client->owner == file)
			destroy_client(client);
	}
	sim_file_drop(file);
	mutex_unlock(&sim_lock);
}
