// SPDX-License-Identifier: GPL-2.0
/*
 * events.c - queues events for the readers of /dev/qgpu. A slow reader loses the newest events, and learns how many.
 * The daemon decides how to react.
 */
#include <linux/ktime.h>
#include <linux/uaccess.h>

#include "events.h"

/* Pods fill at most this much of a queue, so that they cannot push out what else there is to tell. */
#define BY_PODS_MAX 128

static DEFINE_SPINLOCK(readers_lock);
static LIST_HEAD(readers);

void qgpu_reader_add(struct qgpu_reader *reader)
{
	init_waitqueue_head(&reader->wait);
	INIT_KFIFO(reader->fifo);
	spin_lock(&readers_lock);
	list_add(&reader->node, &readers);
	spin_unlock(&readers_lock);
}

void qgpu_reader_remove(struct qgpu_reader *reader)
{
	spin_lock(&readers_lock);
	list_del(&reader->node);
	spin_unlock(&readers_lock);
}

static bool is_by_pod(u32 type)
{
	return type == QGPU_EVENT_TSG_NEW || type == QGPU_EVENT_TSG_GONE || type == QGPU_EVENT_MEMORY_REFUSED ||
	       type == QGPU_EVENT_CONTROL_REFUSED;
}

static bool put(struct qgpu_reader *reader, struct qgpu_event event)
{
	bool by_pod = is_by_pod(event.type);

	if ((by_pod && reader->by_pods == BY_PODS_MAX) || !kfifo_put(&reader->fifo, event))
		return false;
	reader->by_pods += by_pod;
	return true;
}

void qgpu_event(u32 type, u64 pod, u32 gpu, u64 value)
{
	struct qgpu_event event = { ktime_get_ns(), pod, value, type, gpu };
	struct qgpu_reader *reader;

	spin_lock(&readers_lock);
	list_for_each_entry(reader, &readers, node) {
		if (!put(reader, event))
			reader->lost++;
		wake_up_interruptible(&reader->wait);
	}
	spin_unlock(&readers_lock);
}

static bool take(struct qgpu_reader *reader, struct qgpu_event *event)
{
	bool got;

	spin_lock(&readers_lock);
	got = kfifo_get(&reader->fifo, event);
	if (got)
		reader->by_pods -= is_by_pod(event->type);
	if (!got && reader->lost) {
		*event = (struct qgpu_event){ ktime_get_ns(), 0, reader->lost, QGPU_EVENT_LOST, 0 };
		reader->lost = 0;
		got = true;
	}
	spin_unlock(&readers_lock);
	return got;
}

static bool pending(struct qgpu_reader *reader)
{
	return !kfifo_is_empty(&reader->fifo) || READ_ONCE(reader->lost);
}

ssize_t qgpu_reader_read(struct qgpu_reader *reader, char __user *to, size_t size, bool nonblocking)
{
	struct qgpu_event event;
	size_t done = 0;

	if (size < sizeof(event))
		return -EINVAL;
	while (done + sizeof(event) <= size) {
		if (!take(reader, &event)) {
			if (done)
				break;
			if (nonblocking)
				return -EAGAIN;
			if (wait_event_interruptible(reader->wait, pending(reader)))
				return -ERESTARTSYS;
			continue;
		}
		if (copy_to_user(to + done, &event, sizeof(event)))
			return -EFAULT;
		done += sizeof(event);
	}
	return done;
}

__poll_t qgpu_reader_poll(struct qgpu_reader *reader, struct file *file, poll_table *table)
{
	poll_wait(file, &reader->wait, table);
	return pending(reader) ? EPOLLIN | EPOLLRDNORM : 0;
}
