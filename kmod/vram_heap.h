/* SPDX-License-Identifier: GPL-2.0 */
#ifndef _QGPU_VRAM_HEAP_H
#define _QGPU_VRAM_HEAP_H

#include "call.h"

struct qgpu_client;
struct qgpu_mem;

/* A call that asks for memory; the offsets of the object's handle and of RM's status depend on its form. */
struct qgpu_vram {
	bool video;		/* else system memory, or address space */
	u32 root, parent;
	u64 size;		/* may be false; then RM's answer decides */
	u32 space;		/* of address space: in which it lies */
	size_t handle_at, status_at;
};

/* Reserve, call, book. */
long qgpu_vram_alloc(struct qgpu_call *call, const struct qgpu_vram *vram);
bool qgpu_is_physical(u32 class);
/*
 * Whether address space with these flags comes with its page tables, which lie on the card:
 * gpu_vaspace.c:gvaspaceAlloc.
 */
bool qgpu_takes_tables(u32 flags);
/*
 * Whether memory is asked for at an address of the card, for which RM also takes what its alignment spans, or in one half
 * of the card, for which it sets 64 MiB aside.
 */
bool qgpu_chooses_place(u32 flags, u32 attr2);
/* Refuse an allocation and count the refusal. */
long qgpu_refuse_alloc(struct qgpu_call *call, size_t status_at, u32 status);
long qgpu_refuse_memory(struct qgpu_call *call, int gpu, u64 size, size_t status_at);
/* Free what RM made and the pod may not have. */
void qgpu_take_back(struct qgpu_client *client, u32 parent, u32 handle);
/*
 * After RM reported a failure: the handle is free or had its object before; otherwise free what RM made. If the status
 * says that RM did not get so far, nothing is freed.
 */
void qgpu_free_unsaid(const struct qgpu_call *call, u32 status, struct qgpu_client *client, u32 parent, u32 handle);

long qgpu_vid_heap(struct qgpu_call *call);

#endif
