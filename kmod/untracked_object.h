/* SPDX-License-Identifier: GPL-2.0 */
#ifndef _QGPU_UNTRACKED_OBJECT_H
#define _QGPU_UNTRACKED_OBJECT_H

#include "object_table.h"

/* Never given twice. */
u64 qgpu_stamp(void);
/* Under rcu_read_lock(): that of the object with this handle; 0: none is known. */
u64 qgpu_untracked_stamp(struct qgpu_client *client, u32 handle);

/* What bounds the objects of a class. */
enum qgpu_untracked_kind qgpu_untracked_kind(u32 class);

/* All of these but the last need the client's lock. Whether the client may have one more of a class. */
bool qgpu_untracked_fits(struct qgpu_client *client, u32 class);
/* gpu: the card that the object was made for; -1: unknown, or of no use. */
void qgpu_untracked_note(struct qgpu_client *client, u32 handle, u32 class, int gpu);
bool qgpu_untracked_has(struct qgpu_client *client, u32 handle);
int qgpu_untracked_gpu(struct qgpu_client *client, u32 handle);
/* Whether it is the page that RM shares with all programs. */
bool qgpu_untracked_is_page(struct qgpu_client *client, u32 handle);
/* With its mappings, whether it is in the object table or not. */
void qgpu_untracked_forget(struct qgpu_client *client, u32 handle);
/* Whether the client may have one more mapping for the CPU. */
bool qgpu_mapping_fits(struct qgpu_client *client);
/* The same for the card. */
bool qgpu_dma_mapping_fits(struct qgpu_client *client);
/* How many mappings of an object for the CPU there are, at most. */
u32 qgpu_mappings_of(struct qgpu_client *client, u32 handle);
/* Count one more, or one less, of the object with this handle. -ENOMEM: no kernel memory. */
int qgpu_mapping_add(struct qgpu_client *client, u32 handle);
void qgpu_mapping_remove(struct qgpu_client *client, u32 handle);
/* All of them: the client ends. */
void qgpu_untracked_end(struct qgpu_client *client);
/* Ask RM which of a client's are gone, and forget those; -EINTR: a fatal signal came first. */
int qgpu_untracked_forget_gone(struct qgpu_client *client, enum qgpu_untracked_kind kind);
/* Whether so many more, and what other calls of the pod may be making, could take it beyond its maximum. */
bool qgpu_untracked_near_most(const struct qgpu_pod *pod, enum qgpu_untracked_kind kind, u32 more);

#endif
