/* SPDX-License-Identifier: GPL-2.0 */
#ifndef _QGPU_VRAM_HEAP_H
#define _QGPU_VRAM_HEAP_H

#include "call.h"

struct qgpu_client;
struct qgpu_mem;

/* A call that asks for video memory; where the object's handle and RM's status stand differs by form. */
struct qgpu_vram {
	u32 root, parent;
	u64 size;		/* may be a lie; then RM's answer decides */
	size_t handle_at, status_at;
};

/* Reserve, call, book. */
long qgpu_vram_alloc(struct qgpu_call *call, const struct qgpu_vram *vram);
bool qgpu_is_physical(u32 class);
/* Whether address space of these flags comes with its page tables, which lie on the card: gpu_vaspace.c:gvaspaceAlloc. */
bool qgpu_takes_tables(u32 flags);
/* Whether memory is asked for at an address of the card: RM then takes what its alignment spans besides. */
bool qgpu_chooses_place(u32 flags);
/* Refuse an allocation, and count that. */
long qgpu_refuse_alloc(struct qgpu_call *call, size_t status_at, u32 status);
long qgpu_refuse_memory(struct qgpu_call *call, int gpu, u64 size, size_t status_at);
/* Free memory that RM made and the pod may not have. Where UVM has mapped it already mem is what stays charged for it. */
void qgpu_take_back(struct qgpu_client *client, u32 parent, u32 handle, struct qgpu_mem *mem);
/* Of a call that RM said no to: its handle is free, or had its object before; else what it made goes again. */
void qgpu_free_unsaid(struct qgpu_client *client, u32 parent, u32 handle, struct qgpu_mem *mem);

long qgpu_vid_heap(struct qgpu_call *call);

#endif
