/* SPDX-License-Identifier: GPL-2.0 */
/*
 * sim.h - a simulated NVIDIA driver: enough of nvidia.ko for qgpu.ko to stand in, measure and gate.
 *
 * dev.c is the character devices, calls.c the calls, rm.c the objects, memory.c what lies on the cards, control.c the
 * controls, gpu.c the card that runs channels, pm.c what it is like while the machine sleeps,
 * fault.c what fails.
 * Layouts are those of kmod/nvrm.h, which it shares with qgpu.ko on purpose only for its structs.
 */
#ifndef _SIM_H
#define _SIM_H

#include <linux/fs.h>
#include <linux/list.h>
#include <linux/mutex.h>
#include <linux/xarray.h>

#include "nvrm.h"

#define SIM_GPUS_MAX		4
#define SIM_CHANNELS_MAX	512	/* of a card; the real one has a few thousand */
#define SIM_RUNLISTS		20	/* of a card: for compute, and for each copy engine from COPY2 on */
#define SIM_GRCES		2	/* the first copy engines, on the compute engine's runlist, as on an H200 */
#define SIM_SWITCH_NS		84000
#define SIM_LATENCIES		512
#define SIM_HELD_MAX		16
#define SIM_WRITTEN		3	/* error notifiers of both kinds, USERD */
#define SIM_SYSTEM_BYTES	0x2000	/* of system memory, however it is made */

#define NV_ERR_INVALID_CHANNEL	0x21

/* The simulator's own escapes, for tests: a real process would write memory and ring a doorbell. */
#define SIM_ESC_SUBMIT		0xf0
struct sim_submit {
	u32 client, channel;
	u64 kernel_ns;
	u64 count;		/* of kernels; all ones: a flood that never ends; 0: stop */
	u64 period_ns;		/* 0: once; else count kernels every period */
};

#define SIM_ESC_QUERY		0xf1
struct sim_query {
	u32 client, channel;
	u64 now_ns;
	u64 kernels;		/* finished */
	u64 run_ns;		/* of its TSG, on the engine */
	u64 starts;		/* of its TSG */
	u64 nr_latencies;	/* so far; the newest stay in the ring */
	u32 latency_ns[SIM_LATENCIES];
};

/* An open file; RM's notion of who is calling. */
struct sim_file {
	u32 minor;
	struct sim_file *control;	/* REGISTER_FD */
	struct file *control_filp;
	struct sim_mem *held[SIM_HELD_MAX];	/* exported to it, or held inside RM for its clients */
	unsigned int nr_held;
};

struct sim_mem {
	u64 size;
	int refs;
	int gpu;
	u32 class;			/* of the host: of its handles; 0: of the card */
};

struct sim_channel {
	struct list_head node;		/* in its TSG */
	unsigned int disabled;		/* how often, less how often it was enabled since */
	u64 kernel_ns, left, current_ns, period_ns, next_ns, batch;
	u64 submitted_ns;
	u64 kernels, nr_latencies;
	u32 latency_ns[SIM_LATENCIES];
};

struct sim_tsg {
	struct list_head node;		/* on the runlist */
	int runlist;
	struct list_head channels;
	u64 slice_ns, run_ns, starts;
	unsigned int handles;		/* its objects: the one it was made as, and duplicates */
	u32 client, handle;		/* of one of them */
	u32 mode;			/* of preempting compute; what it says has no effect here */
};

struct sim_object {
	u32 handle, parent, class;
	u32 vaspace;			/* that a TSG depends on and goes with; of a channel, its graphics context */
	u32 userd;			/* that a channel goes with: memory the process described itself */
	u32 written[SIM_WRITTEN];	/* memory that the card writes for a TSG or channel */
	int gpu;
	bool doomed;
	struct sim_mem *mem;
	struct sim_tsg *tsg;		/* a TSG, or a channel's */
	struct sim_channel *channel;
};

struct sim_client {
	struct list_head node;
	u32 handle;
	struct sim_file *owner;
	struct xarray objects;
	struct sim_mem *tables;		/* of its mappings by RM */
};

extern struct mutex sim_lock;		/* RM's API lock, and everything else */
extern const struct file_operations *sim_fops;
extern int sim_major;			/* of the driver's version */
extern int sim_nr_gpus;
extern char *sim_version;

/* file NULL: a kernel caller */
u32 sim_escape(struct sim_file *file, u32 nr, void *data, u32 size);
void sim_close(struct sim_file *file);
struct sim_client *sim_client(u32 handle, const struct sim_file *file);
struct sim_object *sim_object(struct sim_client *client, u32 handle);
u32 sim_insert(struct sim_client *client, u32 parent, u32 *handle, u32 class, struct sim_object **ret);
void sim_destroy(struct sim_client *client, struct sim_object *object);
u32 sim_alloc(struct sim_file *file, u32 root, u32 parent, u32 *handle, u32 class, u64 params);
u32 sim_free(const struct sim_file *file, struct nvos00 *arg);
u32 sim_dup(const struct sim_file *file, struct nvos55 *arg);
u32 sim_control(const struct sim_file *file, struct nvos54 *arg);
int sim_copy_in(const struct sim_file *file, void *to, u64 from, size_t size);
int sim_copy_out(const struct sim_file *file, u64 to, const void *from, size_t size);

struct sim_mem *sim_mem_new(int gpu, u64 size);
void sim_mem_put(struct sim_mem *mem);
u64 sim_memory_free(int gpu);
u64 sim_memory_total(void);
u32 sim_alloc_video(const struct sim_file *file, struct sim_object *object, u64 params);
u32 sim_alloc_space(const struct sim_file *file, struct sim_object *object, u64 params);
u32 sim_map_dma(const struct sim_file *file, u32 *data, u32 size);
u32 sim_heap(struct sim_file *file, struct nvos32 *arg);
u32 sim_hold_memory(const struct sim_file *file, struct sim_client *client, u64 params);
u32 sim_put_on_fabric(const struct sim_file *file, struct sim_client *client, struct sim_object *object, u64 params);
u32 sim_export(struct sim_client *client, s32 fd, u32 handle);
u32 sim_import(struct sim_client *client, s32 fd, u32 parent, u32 *handle);
int sim_file_hold(struct sim_file *file, struct sim_mem *mem);
void sim_file_drop(struct sim_file *file);
/* For UVM: memory of the first card that has no handle. */
struct sim_mem *sim_uvm_take(u64 size);
void sim_uvm_wait(void);
void sim_uvm_give_back(struct sim_mem *mem);

extern unsigned int sim_nr_clients, sim_nr_objects;
extern unsigned int sim_nr_waits;	/* frees of gated channels with work */
extern unsigned int sim_nr_strays;	/* frees of memory that the card goes on writing */

struct proc_dir_entry;
extern unsigned int sim_nr_sleeps, sim_asleep_off, sim_asleep_calls;	/* suspends; channels off then; kernel's calls */
void sim_pm_init(void);
void sim_pm_uninit(void);
void sim_pm_called(void);
void sim_pm_proc(struct proc_dir_entry *folder);

/* What befalls a kernel caller's control, or (NULL) a process's call: RM's status, 0: none; may sleep. sim_lock is held. */
u32 sim_fault(const struct nvos54 *control, unsigned int *effect);
void sim_fault_init(struct proc_dir_entry *folder);

void sim_gpu_init(void);
void sim_gpu_uninit(void);
void sim_gpu_advance(int gpu);
/* Which copy engine it is, COPY0 to COPY19, by either of its names (SDK/class/cl2080_notification.h); -1: none. */
int sim_copy_engine(u32 engine);
void sim_gpu_add_tsg(int gpu, struct sim_tsg *tsg, u32 engine);
void sim_gpu_remove_tsg(int gpu, struct sim_tsg *tsg);
void sim_gpu_preempt(int gpu, const struct sim_tsg *tsg);
void sim_gpu_submit(int gpu, struct sim_channel *channel, const struct sim_submit *arg);
unsigned int sim_gpu_off(void);
unsigned int sim_gpu_channels(int gpu);
struct seq_file;
void sim_gpu_show(struct seq_file *seq);

#endif
