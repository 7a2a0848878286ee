/* SPDX-License-Identifier: GPL-2.0 */
#ifndef _QGPU_RM_H
#define _QGPU_RM_H

#include <linux/mutex.h>

#include "nvrm.h"

extern struct mutex qgpu_attach_lock;	/* serializes attaching to the driver and detaching */

/* All of these may sleep and take RM's locks: call them without any lock that a driver call may be waiting for. */
u32 qgpu_rm_control(u32 client, u32 object, u32 cmd, void *params, u32 size);
u32 qgpu_rm_free(u32 client, u32 parent, u32 object);
/* Give an object of any client another handle; 0: RM chooses it. */
u32 qgpu_rm_dup(u32 client, u32 parent, u32 *handle, u32 client_src, u32 object_src);
/* Whether two handles of a client are the same memory. */
bool qgpu_rm_is_duplicate(u32 client, u32 object, u32 other);
u32 qgpu_rm_class(u32 client, u32 object, u32 *class);
/* Whether it is the page that RM shares with all programs, where it keeps only CPUs from writing. */
bool qgpu_rm_is_shared_page(u32 client, u32 object);
/* 0: there is no such object, or RM does not say. */
u32 qgpu_rm_parent(u32 client, u32 object);
/* Whether a status says that there is no such object. */
bool qgpu_rm_says_gone(u32 status);
/* Whether RM says that there is such an object, or none; an error proves neither. */
bool qgpu_rm_has(u32 client, u32 object);
bool qgpu_rm_gone(u32 client, u32 object);
/* How large memory is, in bytes; 0: RM does not say. */
u64 qgpu_rm_memory_bytes(u32 client, u32 memory);
/* How much of the card memory takes, in bytes. */
u32 qgpu_rm_memory_size(u32 client, u32 memory, u64 *size);
u32 qgpu_rm_fb_total(u32 client, u32 subdevice, u64 *bytes);
u32 qgpu_rm_subdevice(u32 client, u32 device, u32 *subdevice);
/* Whether RM says that a copy engine is not on the compute engine's runlist. */
bool qgpu_rm_copies_apart(u32 client, u32 subdevice, u32 engine);
u32 qgpu_rm_gpu_id(u32 client, u32 subdevice, u32 *gpu_id);
int qgpu_rm_enumerate(struct nv_gpu_info infos[NV_MAX_GPUS]);

/* The driver is about to sleep: no call is under way when this returns, and further ones wait; or it is awake again. */
void qgpu_rm_sleep(bool asleep);

/* Find the driver's kernel interface. Returns a QGPU_STATE_*; the functions above work only with ENFORCING. */
u32 qgpu_rm_attach(char *version, size_t size);
void qgpu_rm_detach(void);

/* Set the interface that the glue module offers; NULL: it goes away. False: there is one already. */
bool qgpu_rm_offered(nv_get_rm_ops_t get_rm_ops);

#endif
