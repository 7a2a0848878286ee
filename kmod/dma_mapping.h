/* SPDX-License-Identifier: GPL-2.0 */
#ifndef _QGPU_DMA_MAPPING_H
#define _QGPU_DMA_MAPPING_H

#include "object_table.h"

/* Where a client has RM map memory for the card: in this address space, by this device. */
struct qgpu_dma_range {
	u32 device, space, memory;
	u64 start, length;	/* in bytes */
};

struct qgpu_dma_mapping {
	struct rb_node node;
	struct qgpu_dma_range at;
};

/*
 * All need the client's lock. add: RM has mapped memory there; consumes the entry. sure: RM itself said so; then what
 * overlaps it is gone. Otherwise the mapping counts until RM says that its memory or its address space is gone.
 */
void qgpu_dma_mapping_add(struct qgpu_client *client, struct qgpu_dma_mapping *mapping, bool sure);
/* RM has undone the mapping that starts there. */
void qgpu_dma_mapping_remove(struct qgpu_client *client, const struct qgpu_dma_range *at);
/* Whether RM would leave two parts of a mapping if it undid what lies in a range; no length: one mapping as a whole. */
bool qgpu_dma_mapping_splits(struct qgpu_client *client, const struct qgpu_dma_range *range);
/* RM has undone what lies in a range. Takes the spare entry if it needs one; the rest is returned. */
struct qgpu_dma_mapping *qgpu_dma_mappings_cut(struct qgpu_client *client, const struct qgpu_dma_range *range,
					       struct qgpu_dma_mapping *spare);
/* Ask RM which are gone, and forget those; -EINTR: a fatal signal came first. */
int qgpu_dma_mappings_forget_gone(struct qgpu_client *client);
/* All of them: the client ends. */
void qgpu_dma_mappings_end(struct qgpu_client *client);

#endif
