/* SPDX-License-Identifier: GPL-2.0 */
#ifndef _QGPU_CONTEXT_H
#define _QGPU_CONTEXT_H

#include <linux/types.h>

struct qgpu_client;
struct qgpu_mem;
struct qgpu_object;

/*
 * Charge what RM takes of the card for an object that is about to be made, and that has no handle; NULL: nothing. As
 * long as it is not known on which card a device is, it is on each that has a limit.
 */
struct qgpu_mem *qgpu_reserve_taken(struct qgpu_client *client, u32 parent, u32 class, u32 engine);
void qgpu_device_learned(struct qgpu_object *device);
/* Whether a channel is in a TSG that is charged and counted as one for compute. */
bool qgpu_is_in_compute_tsg(struct qgpu_client *client, u32 channel);
/* A channel has compute now: let it be preempted at any instruction, whether its program asks for that or not. */
void qgpu_make_preemptible(struct qgpu_client *client, u32 channel);
/* Give the object of a TSG or channel the TSG that it is or is in; nothing for another. -ENODEV: its card is not known. */
int qgpu_enter_tsg(struct qgpu_client *client, struct qgpu_object *object, u32 engine);

#endif
