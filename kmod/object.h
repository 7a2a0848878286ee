/* SPDX-License-Identifier: GPL-2.0 */
#ifndef _QGPU_OBJECT_H
#define _QGPU_OBJECT_H

#include "register.h"

/* All of these need the client's lock. */
struct qgpu_object *qgpu_object_find(struct qgpu_client *client, u32 handle);
struct qgpu_object *qgpu_object_add(struct qgpu_client *client, u32 handle, u32 parent, u32 class, bool sure);
int qgpu_object_gpu(struct qgpu_client *client, u32 handle);
u32 qgpu_object_device(struct qgpu_client *client, u32 handle);
/* Whether it is the last subdevice of a device with TSGs: gating them is a control on it. */
bool qgpu_object_needed(struct qgpu_client *client, struct qgpu_object *object);
/* The classes that the register keeps beside clients and memory. */
bool qgpu_is_registered(u32 class);
/* Whether it has channels. */
bool qgpu_objects_run(struct qgpu_client *client);
/*
 * Keep the gates of what is below (or hangs on) an object open while the driver frees it. True: a gate was opened by it
 * that was closed.
 */
bool qgpu_objects_hold(struct qgpu_client *client, u32 handle);
void qgpu_objects_unhold(struct qgpu_client *client);
void qgpu_objects_remove(struct qgpu_client *client, u32 handle);
/* Ask RM which channels and TSGs are left, and forget those that are not. */
void qgpu_objects_reconcile(struct qgpu_client *client);
bool qgpu_objects_reclose(struct qgpu_client *client);

/* All memory that it has handles on is exported, as far as one can tell. */
void qgpu_objects_export(struct qgpu_client *client);

extern atomic_t qgpu_nr_objects;

#endif
