// SPDX-License-Identifier: GPL-2.0
/*
 * dma_mapping.c - where a client has RM map memory for the card: RM holds its lock while it undoes all mappings of what
 * it frees. untracked_object.c bounds them.
 *
 * RM finds a mapping by the handles of its device and address space and by its start, and since 550 those in a range
 * (rs_server.c: serverInterUnmapInternal). It undoes mappings with their memory and their address space, too. Those are
 * forgotten once RM maps something else there, or RM is asked before another one is refused.
 *
 * In an address space RM lets no two mappings of a device overlap (mapping_list.c: intermapRegisterDmaMapping). In a
 * context DMA they may.
 */
#include <linux/sched.h>
#include <linux/sched/signal.h>
#include <linux/slab.h>

#include "dma_mapping.h"
#include "nvrm.h"
#include "rm.h"

static u64 end_of(const struct qgpu_dma_range *range)
{
	u64 end = range->start + range->length;

	return end < range->start ? U64_MAX : end;
}

/* In order of devices, address spaces and starts. */
static int compare(const struct qgpu_dma_range *a, const struct qgpu_dma_range *b)
{
	if (a->device != b->device)
		return a->device < b->device ? -1 : 1;
	if (a->space != b->space)
		return a->space < b->space ? -1 : 1;
	if (a->start != b->start)
		return a->start < b->start ? -1 : 1;
	return 0;
}

static struct qgpu_dma_mapping *entry(struct rb_node *node)
{
	return rb_entry_safe(node, struct qgpu_dma_mapping, node);
}

static struct qgpu_dma_mapping *after(struct qgpu_dma_mapping *mapping)
{
	return entry(rb_next(&mapping->node));
}

static bool overlap(const struct qgpu_dma_range *a, const struct qgpu_dma_range *b)
{
	return a->device == b->device && a->space == b->space && a->start < end_of(b) && b->start < end_of(a);
}

/* The last one that starts where the range does or before, in any address space; NULL: there is none. */
static struct qgpu_dma_mapping *last_before(struct qgpu_client *client, const struct qgpu_dma_range *range)
{
	struct rb_node *node = client->dma_mappings.rb_node;
	struct qgpu_dma_mapping *found = NULL;

	while (node) {
		if (compare(&entry(node)->at, range) <= 0) {
			found = entry(node);
			node = node->rb_right;
		} else {
			node = node->rb_left;
		}
	}
	return found;
}

/* The first that overlaps the range, where none overlap each other; NULL: none does. */
static struct qgpu_dma_mapping *first_in(struct qgpu_client *client, const struct qgpu_dma_range *range)
{
	struct qgpu_dma_mapping *mapping = last_before(client, range);

	if (!mapping || !overlap(&mapping->at, range))
		mapping = mapping ? after(mapping) : entry(rb_first(&client->dma_mappings));
	return mapping && overlap(&mapping->at, range) ? mapping : NULL;
}

static void insert(struct qgpu_client *client, struct qgpu_dma_mapping *mapping)
{
	struct rb_node **link = &client->dma_mappings.rb_node, *parent = NULL;

	while (*link) {
		parent = *link;
		link = compare(&mapping->at, &entry(parent)->at) < 0 ? &parent->rb_left : &parent->rb_right;
	}
	rb_link_node(&mapping->node, parent, link);
	rb_insert_color(&mapping->node, &client->dma_mappings);
	qgpu_untracked_count(client, QGPU_UNTRACKED_DMA_MAPPING, 1);
}

static void forget(struct qgpu_client *client, struct qgpu_dma_mapping *mapping)
{
	rb_erase(&mapping->node, &client->dma_mappings);
	qgpu_untracked_count(client, QGPU_UNTRACKED_DMA_MAPPING, -1);
	kfree(mapping);
}

static bool may_be_context_dma(struct qgpu_client *client, u32 space)
{
	u32 class;

	return qgpu_rm_class(client->handle, space, &class) != NV_OK || class == NV01_CONTEXT_DMA;
}

void qgpu_dma_mapping_add(struct qgpu_client *client, struct qgpu_dma_mapping *mapping, bool sure)
{
	struct qgpu_dma_mapping *old;

	lockdep_assert_held(&client->lock);
	if (!sure)
		mapping->at.device = 0;	/* no call names it: it hides no other */
	if (sure && first_in(client, &mapping->at) && !may_be_context_dma(client, mapping->at.space)) {
		while ((old = first_in(client, &mapping->at))) {
			forget(client, old);
			cond_resched();
		}
	}
	insert(client, mapping);
}

void qgpu_dma_mapping_remove(struct qgpu_client *client, const struct qgpu_dma_range *at)
{
	struct qgpu_dma_mapping *mapping = last_before(client, at);

	lockdep_assert_held(&client->lock);
	if (mapping && !compare(&mapping->at, at))
		forget(client, mapping);
}

bool qgpu_dma_mapping_splits(struct qgpu_client *client, const struct qgpu_dma_range *range)
{
	struct qgpu_dma_mapping *mapping = first_in(client, range);

	lockdep_assert_held(&client->lock);
	return range->length && mapping && mapping->at.start < range->start && end_of(range) < end_of(&mapping->at);
}

struct qgpu_dma_mapping *qgpu_dma_mappings_cut(struct qgpu_client *client, const struct qgpu_dma_range *range,
					       struct qgpu_dma_mapping *spare)
{
	struct qgpu_dma_mapping *mapping = first_in(client, range), *next;
	u64 end = end_of(range);

	lockdep_assert_held(&client->lock);
	for (; mapping && overlap(&mapping->at, range); mapping = next) {
		u64 mapping_end = end_of(&mapping->at);

		next = after(mapping);
		if (mapping_end > end && mapping->at.start < range->start) {
			spare->at = mapping->at;
			spare->at.start = end;
			spare->at.length = mapping_end - end;
			mapping->at.length = range->start - mapping->at.start;
			insert(client, spare);
			return NULL;
		}
		if (mapping->at.start < range->start) {
			mapping->at.length = range->start - mapping->at.start;
		} else if (mapping_end > end) {	/* stays in its place in the tree: what is before it ends before the range */
			mapping->at.start = end;
			mapping->at.length = mapping_end - end;
		} else {
			forget(client, mapping);
		}
		cond_resched();
	}
	return spare;
}

/* RM's last answer about a handle, of which many mappings in a row may be. */
struct asked {
	u32 handle;
	bool gone;
};

static bool is_gone(struct qgpu_client *client, u32 handle, struct asked *last)
{
	if (handle != last->handle) {
		last->handle = handle;
		last->gone = qgpu_rm_gone(client->handle, handle);
	}
	return last->gone;
}

int qgpu_dma_mappings_forget_gone(struct qgpu_client *client)
{
	struct qgpu_dma_mapping *mapping, *next;
	struct asked space = {}, memory = {};

	lockdep_assert_held(&client->lock);
	for (mapping = entry(rb_first(&client->dma_mappings)); mapping; mapping = next) {
		if (fatal_signal_pending(current))
			return -EINTR;
		next = after(mapping);
		if (is_gone(client, mapping->at.space, &space) || is_gone(client, mapping->at.memory, &memory))
			forget(client, mapping);
		cond_resched();
	}
	return 0;
}

void qgpu_dma_mappings_end(struct qgpu_client *client)
{
	struct rb_node *node;

	lockdep_assert_held(&client->lock);
	while ((node = rb_first(&client->dma_mappings))) {
		forget(client, entry(node));
		cond_resched();
	}
}
