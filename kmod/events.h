/* SPDX-License-Identifier: GPL-2.0 */
#ifndef _QGPU_EVENTS_H
#define _QGPU_EVENTS_H

#include <linux/kfifo.h>
#include <linux/list.h>
#include <linux/poll.h>
#include <linux/wait.h>

#include "uapi/qgpu.h"

/* One reader: the events that an open /dev/qgpu has not read yet. */
struct qgpu_reader {
	struct list_head node;
	wait_queue_head_t wait;
	DECLARE_KFIFO(fifo, struct qgpu_event, 256);
	unsigned int by_pods;	/* in fifo, of kinds that a pod can cause at will */
	u64 lost;
};

void qgpu_reader_add(struct qgpu_reader *reader);
void qgpu_reader_remove(struct qgpu_reader *reader);
ssize_t qgpu_reader_read(struct qgpu_reader *reader, char __user *to, size_t size, bool nonblocking);
__poll_t qgpu_reader_poll(struct qgpu_reader *reader, struct file *file, poll_table *table);

/* Queue for every reader; never sleeps, callable from any context but hard interrupts. */
void qgpu_event(u32 type, u64 pod, u32 gpu, u64 value);

#endif
