/* SPDX-License-Identifier: GPL-2.0 */
#ifndef _QGPU_OBJECT_H
#define _QGPU_OBJECT_H

#include "object_table.h"

/* All of these need the client's lock. */
struct qgpu_object *qgpu_object_find(struct qgpu_client *client, u32 handle);
struct qgpu_object *qgpu_object_add(struct qgpu_client *client, u32 handle, u32 parent, u32 class, bool sure);
int qgpu_object_gpu(struct qgpu_client *client, u32 handle);
u32 qgpu_object_device(struct qgpu_client *client, u32 handle);
/*
 * The card that memory lies on, or that host memory was made for, of which it has its addresses (memdescGetPhysAddr);
 * -1: unknown.
 */
int qgpu_memory_gpu(struct qgpu_client *client, u32 handle);
/* Gating TSGs below a device is a control on a subdevice of it: how many it has, and whether this is the last one. */
u32 qgpu_device_subdevices(struct qgpu_client *client, u32 device);
bool qgpu_object_needed(struct qgpu_client *client, struct qgpu_object *object);
/* The classes that the object table keeps besides clients and memory. */
bool qgpu_is_registered(u32 class);
/* Memory of the card, or an object of the NVLink fabric, which keeps memory as a further handle of it does. */
bool qgpu_is_memory(u32 class);
/* The object is a channel in its TSG, or its memory is named. */
void qgpu_object_stamp(struct qgpu_object *object);
/*
 * The card writes memory for a TSG or channel, as long as this exists. may_be: whether the process may write it, too,
 * and RM keeps it until the handle is freed. note: of a new object.
 */
bool qgpu_written_may_be(struct qgpu_client *client, u32 memory);
void qgpu_written_note(struct qgpu_client *client, struct qgpu_object *object, const u32 written[QGPU_WRITTEN_MAX]);
/* Whether an object below this parent may use an address space: 0, or one of its own card. */
bool qgpu_space_may_be(struct qgpu_client *client, u32 parent, u32 space);
/* A TSG or channel that RM would keep although memory that the card writes for it goes with an object; NULL: none. */
struct qgpu_object *qgpu_written_for(struct qgpu_client *client, u32 handle);
/* Whether it has a handle on a TSG that has others. */
bool qgpu_objects_share(struct qgpu_client *client);
/*
 * Keep the gates of everything below an object, and of everything that depends on it, open while the driver frees it.
 * True: the plan may close such a gate meanwhile. As for qgpu_tsg_hold(), nothing has moved when this returns.
 */
bool qgpu_objects_hold(struct qgpu_client *client, u32 handle, u32 *gpus);
void qgpu_objects_unhold(struct qgpu_client *client);
void qgpu_objects_remove(struct qgpu_client *client, u32 handle);
/* Ask RM which channels and TSGs are left, and forget the others. */
void qgpu_objects_reconcile(struct qgpu_client *client);
bool qgpu_objects_reclose(struct qgpu_client *client);

/*
 * fits: whether the client may have one more object of a class below a parent, as far as nothing else bounds them; else
 * the refusal is counted. number: of a device, as the call says. note: RM has made an object that the table does not
 * keep, unless the class says that it does. gpu: the card that it was made for; -1: unknown. sure: RM itself said so;
 * then what had its handle is gone.
 */
bool qgpu_object_fits(struct qgpu_client *client, u32 parent, u32 class, u32 number);
void qgpu_object_note(struct qgpu_client *client, u32 handle, u32 class, int gpu, bool sure);

/*
 * Treat all memory that the client has handles on as exported, as far as it is known; any: and what RM took of the card
 * for its other objects.
 */
void qgpu_objects_export(struct qgpu_client *client, bool any);

extern atomic_t qgpu_nr_objects;

#endif
