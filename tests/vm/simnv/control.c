// SPDX-License-Identifier: GPL-2.0
/*
 * control.c - RM controls: those that qgpu or a memory query uses are done, the others are answered OK untouched,
 * but for the few the recorded card answered otherwise. Also the interface for kernel callers.
 */
#include <linux/delay.h>
#include <linux/export.h>
#include <linux/module.h>
#include <linux/slab.h>

#include "sim.h"

/* How long the card's firmware takes to gate, as measured. RM keeps its locks meanwhile. */
static u32 gate_us = 300;
module_param(gate_us, uint, 0644);

/* So many gate controls from now on are answered "busy". */
static u32 gate_busy;
module_param(gate_busy, uint, 0644);

/* How many gate controls there were. */
static u32 gate_calls;
module_param(gate_calls, uint, 0644);

/* The next gate control that names so many channels finds this one missing. */
static u32 gate_misses;
module_param(gate_misses, uint, 0644);

/* Refuse gate controls for channels of other clients than the caller's: the strictest a firmware could be. */
static bool gate_own_clients;
module_param(gate_own_clients, bool, 0644);

/* Whether channels that are scheduled run whatever a gate did before: the worst a firmware could do. A real one's don't. */
static bool schedule_opens = true;
module_param(schedule_opens, bool, 0644);

#define GPU_ID_FIRST			6	/* as on the recorded machine */

static u32 handle_info(struct sim_client *client, struct nv0000_handle_info *info)
{
	struct sim_object *object = sim_object(client, info->object);

	if (info->object == client->handle) {
		info->result = info->index == NV0000_HANDLE_INFO_CLASS ? NV01_ROOT_CLIENT : 0;
		return NV_OK;
	}
	if (!object)
		return NV_ERR_OBJECT_NOT_FOUND;
	info->result = info->index == NV0000_HANDLE_INFO_CLASS ? object->class : object->parent;
	return NV_OK;
}

static u32 find_subdevice(struct sim_client *client, u32 device, struct nv0080_find_subdevice *find)
{
	struct sim_object *object;
	unsigned long index;

	xa_for_each(&client->objects, index, object) {
		if (object->class == NV20_SUBDEVICE_0 && object->parent == device) {
			find->subdevice = object->handle;
			return NV_OK;
		}
	}
	return NV_ERR_OBJECT_NOT_FOUND;
}

static u32 surface_info(const struct sim_file *file, struct sim_object *object, struct nv0041_surface_info *info)
{
	struct nv0041_surface_entry entry;
	u64 size = object->class == NV01_MEMORY_SYSTEM ? SIM_SYSTEM_BYTES : object->mem ? object->mem->size : 0;
	u32 i;

	if (!size)
		return NV_ERR_INVALID_ARGUMENT;
	for (i = 0; i < info->size; i++) {
		u64 at = info->list + i * sizeof(entry);

		if (sim_copy_in(file, &entry, at, sizeof(entry)))
			return NV_ERR_INVALID_ARGUMENT;
		if (entry.index != NV0041_INDEX_PHYS_SIZE)
			return NV_ERR_INVALID_ARGUMENT;
		entry.data = size / NV0041_PHYS_SIZE_UNIT;
		if (sim_copy_out(file, at, &entry, sizeof(entry)))
			return NV_ERR_INVALID_ARGUMENT;
	}
	return NV_OK;
}

static u32 fb_entry(int gpu, struct nv2080_fb_entry *entry)
{
	switch (entry->index) {
	case NV2080_FB_INFO_RAM_SIZE:
	case NV2080_FB_INFO_TOTAL_RAM_SIZE:
	case NV2080_FB_INFO_HEAP_SIZE:
		entry->data = sim_memory_total() >> 10;
		break;
	case NV2080_FB_INFO_HEAP_FREE:
		entry->data = sim_memory_free(gpu) >> 10;
		break;
	default:
		entry->data = 0;
	}
	return NV_OK;
}

static u32 fb_list_length(void)
{
	return sim_major >= 580 ? 128 : sim_major >= 560 ? 57 : sim_major >= 545 ? 55 : 54;
}

static u32 fb_info(int gpu, u32 *params)
{
	u32 i;

	if (params[0] > fb_list_length())
		return NV_ERR_INVALID_ARGUMENT;
	for (i = 0; i < params[0]; i++)
		fb_entry(gpu, (struct nv2080_fb_entry *)(params + 1) + i);
	return NV_OK;
}

static u32 gate(const struct sim_client *caller, const struct nv2080_disable_channels *arg)
{
	u32 i;

	gate_calls++;
	if (gate_busy) {
		gate_busy--;
		return NV_ERR_BUSY_RETRY;
	}
	if (arg->num > NV_DISABLE_CHANNELS_MAX)
		return NV_ERR_INVALID_ARGUMENT;
	if (gate_us)	/* it takes effect at the end of the call */
		usleep_range(gate_us, gate_us + 50);
	/* As on a real card: counted, and what comes before a channel that is not there is done all the same. */
	for (i = 0; i < arg->num; i++) {
		struct sim_client *client = sim_client(arg->clients[i], NULL);
		struct sim_object *object = client ? sim_object(client, arg->channels[i]) : NULL;

		if (!object || !object->channel)
			return NV_ERR_INVALID_CHANNEL;
		if (gate_own_clients && client != caller)
			return NV_ERR_INVALID_CLIENT;
		if (i + 1 == gate_misses) {
			gate_misses = 0;
			return NV_ERR_INVALID_CHANNEL;
		}
		sim_gpu_advance(object->gpu);
		if (arg->disable && arg->only_scheduling)
			continue;	/* it runs on until another TSG wants the engine, which may be never */
		if (arg->disable)
			object->channel->disabled++;
		else if (object->channel->disabled)
			object->channel->disabled--;
	}
	return NV_OK;
}

static u32 set_timeslice(struct sim_object *object, const struct nva06c_timeslice *arg)
{
	if (!object->tsg)
		return NV_ERR_INVALID_ARGUMENT;
	sim_gpu_advance(object->gpu);
	object->tsg->slice_ns = arg->timeslice_us * 1000;
	return NV_OK;
}

/* kfifoRunlistSetId_GM107, of a TSG's first channel */
static u32 bind(struct sim_object *object, u32 engine)
{
	if (!object->channel)
		return NV_ERR_INVALID_ARGUMENT;
	sim_gpu_remove_tsg(object->gpu, object->tsg);
	sim_gpu_add_tsg(object->gpu, object->tsg, engine);
	return NV_OK;
}

static u32 preempt(struct sim_object *object)
{
	if (object->class != KEPLER_CHANNEL_GROUP_A)
		return NV_ERR_INVALID_ARGUMENT;
	sim_gpu_preempt(object->gpu, object->tsg);
	return NV_OK;
}

static u32 set_preemption(struct sim_client *client, const struct nv2080_preemption_mode *arg)
{
	struct sim_object *object = sim_object(client, arg->channel);

	if (!object || !object->tsg)
		return NV_ERR_OBJECT_NOT_FOUND;
	if (arg->flags & NV2080_PREEMPTION_MODE_FLAGS_CILP)
		object->tsg->mode = arg->compute;
	return NV_OK;
}

static void start_channels(struct sim_object *object)
{
	struct sim_channel *channel;

	if (!object || !object->tsg || !schedule_opens)
		return;
	sim_gpu_advance(object->gpu);
	list_for_each_entry(channel, &object->tsg->channels, node) {
		if (!object->channel || channel == object->channel)
			channel->disabled = 0;
	}
}

static u32 copy_caps(struct nv2080_ce_caps *arg)
{
	int copy = sim_copy_engine(arg->engine);

	if (copy < 0)
		return NV_ERR_NOT_SUPPORTED;
	arg->caps[0] = copy < SIM_GRCES ? 0xe3 : 0xe2;
	arg->caps[1] = 0x03;
	return NV_OK;
}

/* A process with number N has N bytes. */
static u32 pid_info(struct nv2080_pid_infos *asked)
{
	u32 i;

	if (!asked->num || asked->num > ARRAY_SIZE(asked->infos))
		return NV_ERR_INVALID_ARGUMENT;
	for (i = 0; i < asked->num; i++) {
		asked->infos[i].result = asked->infos[i].index ? NV_ERR_INVALID_ARGUMENT : NV_OK;
		asked->infos[i].memory[0] = asked->infos[i].index ? 0 : asked->infos[i].pid;
	}
	return NV_OK;
}

/* Sizes that RM insists on; 0: a control that is not looked into. */
static size_t size_of(u32 cmd)
{
	switch (cmd) {
	case NV0000_CLIENT_GET_HANDLE_INFO:
		return sizeof(struct nv0000_handle_info);
	case NV2080_GPU_GET_ID:
		return sizeof(struct nv2080_gpu_id);
	case NV0000_CLIENT_OBJECTS_ARE_DUPLICATES:
		return sizeof(struct nv0000_duplicates);
	case NV0000_OS_UNIX_EXPORT_OBJECT_TO_FD:
		return sizeof(struct nv0000_export_object);
	case NV0000_OS_UNIX_EXPORT_OBJECTS_TO_FD:
		return sizeof(struct nv0000_export_objects);
	case NV0000_OS_UNIX_IMPORT_OBJECT_FROM_FD:
		return sizeof(struct nv0000_import_object);
	case NV0000_OS_UNIX_IMPORT_OBJECTS_FROM_FD:
		return sizeof(struct nv0000_import_objects);
	case NV0080_GPU_FIND_SUBDEVICE_HANDLE:
		return sizeof(struct nv0080_find_subdevice);
	case NV0041_GET_SURFACE_INFO:
		return sizeof(struct nv0041_surface_info);
	case NV2080_GPU_GET_PID_INFO:
		return sizeof(struct nv2080_pid_infos);
	case NV2080_FB_GET_INFO_V2:
		return NV2080_FB_INFO_ENTRY_AT + fb_list_length() * sizeof(struct nv2080_fb_entry);
	case NV2080_FIFO_DISABLE_CHANNELS:
		return sizeof(struct nv2080_disable_channels);
	case NV2080_CE_GET_CAPS_V2:
		return sizeof(struct nv2080_ce_caps);
	case NV2080_GR_SET_CTXSW_PREEMPTION_MODE:
		return sizeof(struct nv2080_preemption_mode);
	case NVA06C_SET_TIMESLICE:
		return sizeof(struct nva06c_timeslice);
	case NVA06C_PREEMPT:
		return sizeof(struct nva06c_preempt);
	case NVA06F_BIND:
		return sizeof(u32);
	}
	return 0;
}

static u32 are_duplicates(struct sim_client *client, struct nv0000_duplicates *arg)
{
	struct sim_object *a = sim_object(client, arg->objects[0]), *b = sim_object(client, arg->objects[1]);

	if (!a || !b)
		return NV_ERR_OBJECT_NOT_FOUND;
	arg->duplicates = a->mem && a->mem == b->mem;
	return NV_OK;
}

/* A file carries one object here, in place 1 of more than one: place 0 is then empty, and RM leaves it alone. */
static u32 import_all(struct sim_client *client, struct nv0000_import_objects *imports)
{
	int at = imports->num > 1;

	memset(imports->types, 0, sizeof(imports->types));
	if (!imports->num)
		return NV_OK;
	imports->types[at] = 1;
	return sim_import(client, imports->fd, imports->parent, &imports->objects[at]);
}

static u32 perform_on_client(struct sim_client *client, u32 cmd, void *params)
{
	struct nv0000_export_objects *exports = params;
	struct nv0000_import_objects *imports = params;
	struct nv0000_export_object *export = params;
	struct nv0000_import_object *import = params;

	switch (cmd) {
	case NV0000_CLIENT_GET_HANDLE_INFO:
		return handle_info(client, params);
	case NV0000_CLIENT_OBJECTS_ARE_DUPLICATES:
		return are_duplicates(client, params);
	case NV0000_OS_UNIX_EXPORT_OBJECT_TO_FD:
		return sim_export(client, export->fd, export->object);
	case NV0000_OS_UNIX_EXPORT_OBJECTS_TO_FD:
		return sim_export(client, exports->fd, exports->objects[0]);
	case NV0000_OS_UNIX_IMPORT_OBJECT_FROM_FD:
		return sim_import(client, import->fd, import->parent, &import->object);
	case NV0000_OS_UNIX_IMPORT_OBJECTS_FROM_FD:
		return import_all(client, imports);
	}
	return NV_ERR_NOT_SUPPORTED;
}

static u32 perform(const struct sim_file *file, struct sim_client *client, struct nvos54 *arg, void *params)
{
	struct sim_object *object = sim_object(client, arg->object);

	if (arg->object == client->handle)
		return perform_on_client(client, arg->cmd, params);
	if (!object)
		return NV_ERR_OBJECT_NOT_FOUND;
	switch (arg->cmd) {
	case NV0080_GPU_FIND_SUBDEVICE_HANDLE:
		return find_subdevice(client, object->handle, params);
	case NV0041_GET_SURFACE_INFO:
		return surface_info(file, object, params);
	case NV2080_GPU_GET_PID_INFO:
		return pid_info(params);
	case NV2080_FB_GET_INFO_V2:
		return fb_info(object->gpu, params);
	case NV2080_GPU_GET_ID:
		((struct nv2080_gpu_id *)params)->gpu_id = object->gpu << 8 | GPU_ID_FIRST;
		return object->class == NV20_SUBDEVICE_0 ? NV_OK : NV_ERR_INVALID_ARGUMENT;
	case NV2080_FIFO_DISABLE_CHANNELS:
		return object->class == NV20_SUBDEVICE_0 ? gate(client, params) : NV_ERR_INVALID_ARGUMENT;
	case NV2080_CE_GET_CAPS_V2:
		return copy_caps(params);
	case NV2080_GR_SET_CTXSW_PREEMPTION_MODE:
		return set_preemption(client, params);
	case NVA06C_SET_TIMESLICE:
		return set_timeslice(object, params);
	case NVA06C_PREEMPT:
		return preempt(object);
	case NVA06F_BIND:
		return bind(object, *(u32 *)params);
	}
	return NV_ERR_NOT_SUPPORTED;
}

/* What the recorded card said no to; 0x2080014b asks for the version of an object it has, or has not. */
static u32 as_recorded(const struct sim_file *file, u32 cmd, u64 params)
{
	char name[4] = "";

	switch (cmd) {
	case 0x2080014b:
		sim_copy_in(file, name, params, 3);
		return strcmp(name, "OBD") && strcmp(name, "ECC") && strcmp(name, "EEN") ? NV_ERR_OBJECT_NOT_FOUND :
											   NV_OK;
	case 0x20801357:
	case 0x2080852f:
		return NV_ERR_NOT_SUPPORTED;
	}
	return NV_OK;
}

u32 sim_control(const struct sim_file *file, struct nvos54 *arg)
{
	struct sim_client *client = sim_client(arg->client, file);
	size_t size = size_of(arg->cmd);
	void *params;
	u32 status;

	if (!file)
		sim_pm_called();
	/* RmGssLegacyRpcCmd: raw to the firmware, whoever the client is */
	if (arg->cmd & NV_CONTROL_GSS_LEGACY)
		return as_recorded(file, arg->cmd, arg->params);
	if (!client)
		return NV_ERR_INVALID_CLIENT;
	if (arg->object != client->handle && !sim_object(client, arg->object))
		return NV_ERR_OBJECT_NOT_FOUND;
	if (arg->cmd == NVA06C_GPFIFO_SCHEDULE || arg->cmd == NVA06F_GPFIFO_SCHEDULE)
		start_channels(sim_object(client, arg->object));
	if (!size)
		return as_recorded(file, arg->cmd, arg->params);
	if (arg->params_size != size)
		return NV_ERR_INVALID_ARGUMENT;
	params = kzalloc(size, GFP_KERNEL);
	if (!params)
		return NV_ERR_NO_MEMORY;
	status = sim_copy_in(file, params, arg->params, size) ? NV_ERR_INVALID_ARGUMENT :
								perform(file, client, arg, params);
	if (!status && sim_copy_out(file, arg->params, params, size))
		status = NV_ERR_INVALID_ARGUMENT;
	kfree(params);
	return status;
}

static int alloc_stack(struct nvidia_stack_s **stack)
{
	*stack = NULL;
	return 0;
}

static void free_stack(struct nvidia_stack_s *stack)
{
}

static u32 enumerate_gpus(struct nv_gpu_info *infos)
{
	int i;

	for (i = 0; i < sim_nr_gpus; i++)
		infos[i] = (struct nv_gpu_info){ .gpu_id = i << 8 | GPU_ID_FIRST, .bus = i + 1 };
	return sim_nr_gpus;
}

static u32 faulty_control(struct nvos54 *control)
{
	struct nv2080_disable_channels *gate = (void *)(uintptr_t)control->params;
	unsigned int effect;
	u32 fault = sim_fault(control, &effect), status, num;

	if (!effect)
		return fault;
	if (effect == 1 || control->cmd != NV2080_FIFO_DISABLE_CHANNELS) {
		status = sim_control(NULL, control);
		return fault ?: status;
	}
	num = gate->num;
	gate->num = num / 2;
	sim_control(NULL, control);
	gate->num = num;
	return fault;
}

static void op(struct nvidia_stack_s *stack, void *cmd)
{
	struct nv_kernel_op *op = cmd;

	might_sleep();
	mutex_lock(&sim_lock);
	if (op->op == NV01_FREE)
		op->params.free.status = sim_free(NULL, &op->params.free);
	else if (op->op == NV04_CONTROL)
		op->params.control.status = faulty_control(&op->params.control);
	else if (op->op == NV04_DUP_OBJECT)
		op->params.dup.status = sim_dup(NULL, &op->params.dup);
	mutex_unlock(&sim_lock);
}

u32 nvidia_get_rm_ops(struct nv_rm_ops *ops);
u32 nvidia_get_rm_ops(struct nv_rm_ops *ops)
{
	if (strcmp(ops->version_string, sim_version)) {
		ops->version_string = sim_version;
		return NV_ERR_GENERIC;
	}
	ops->alloc_stack = alloc_stack;
	ops->free_stack = free_stack;
	ops->enumerate_gpus = enumerate_gpus;
	ops->op = op;
	return NV_OK;
}
#ifdef SIM_PLAIN_EXPORT
EXPORT_SYMBOL(nvidia_get_rm_ops);	/* before 565.57.01 */
#else
EXPORT_SYMBOL_GPL(nvidia_get_rm_ops);
#endif
