/* SPDX-License-Identifier: GPL-2.0 */
#ifndef _QGPU_CONTEXT_H
#define _QGPU_CONTEXT_H

#include <linux/types.h>

struct qgpu_client;
struct qgpu_mem;
struct qgpu_object;
struct qgpu_tsg;

/*
 * Charge what RM takes of the card for an object that is about to be made and has no memory handle; NULL: nothing.
 * While the card of a device is unknown, the charge counts on each card that has a limit. The charge for an address
 * space made meanwhile stays on all of them.
 */
struct qgpu_mem *qgpu_reserve_taken(struct qgpu_client *client, u32 parent, u32 class, u32 engine);
void qgpu_device_learned(struct qgpu_object *device);
/* Whether the object would be a TSG, or a channel that RM makes a TSG for. */
bool qgpu_brings_tsg(struct qgpu_client *client, u32 parent, u32 class);
/* Whether a channel is in a TSG that is charged and counted as a compute TSG. */
bool qgpu_is_in_compute_tsg(struct qgpu_client *client, u32 channel);
/*
 * Whether a channel may be put on an engine's runlist. Its TSG goes there, too (kfifoRunlistSetId_GM107), whatever
 * engine it was made for, and must be gated and have its timeslices as the others there.
 */
bool qgpu_may_run_on(struct qgpu_client *client, u32 channel, u32 engine);
/* Whether a channel may be reset together with an engine: only with its TSG's, or (0) with none. */
bool qgpu_may_reset(struct qgpu_client *client, u32 channel, u32 engine);
/*
 * The channel runs compute now: set it to preemption at any instruction, even if its program did not ask for that.
 * False: RM did not do it, though the card may be able to.
 */
bool qgpu_make_preemptible(struct qgpu_client *client, u32 channel);
/*
 * Set the object's TSG if it is a TSG or channel, else do nothing. sealed: RM has read this engine. -ENODEV: no known
 * card, or no subdevice to gate it.
 */
int qgpu_enter_tsg(struct qgpu_client *client, struct qgpu_object *object, u32 engine, bool sealed);
/* The object is a further handle on a TSG of its card; as for qgpu_tsg_share(). */
int qgpu_enter_shared_tsg(struct qgpu_client *client, struct qgpu_object *object, struct qgpu_tsg *tsg, u64 stamp);
/* What is charged for each handle on a TSG of this engine. */
u64 qgpu_tsg_bytes(u32 engine);

#endif
