/* SPDX-License-Identifier: GPL-2.0 */
#ifndef _QGPU_DRIVER_FILE_H
#define _QGPU_DRIVER_FILE_H

#include <linux/fs.h>
#include <linux/list.h>
#include <linux/rhashtable-types.h>

struct qgpu_pod;

/* A file of the NVIDIA driver that belongs to a pod, until its release. */
struct qgpu_file {
	struct rhash_head node;
	struct file *filp;
	struct qgpu_pod *pod;		/* a reference */
	struct list_head clients;	/* client.c */
	bool held;			/* its release keeps gates open */
	bool shared;			/* ... that other processes use too */
	bool made_os_events;		/* they may be gone by now */
	atomic_t carries;		/* pGPUs of memory that pods have exported by it: toctou.c */
	struct qgpu_pod *exporter;	/* a reference: the first of them; NULL: none */
	atomic_t nr_exports;		/* how many of its nr_exports end with this file */
	u64 gated_ns;			/* how long the pod's gates had been due closed when its release began; before: all ones */
	u64 starved_ns;			/* ... and its task had waited for a CPU */
	struct rcu_head rcu;
};

int qgpu_files_init(void);
void qgpu_files_uninit(void);

/* The file of a call, made the current task's pod's if need be; NULL: no pod's, ERR_PTR: no memory for the entry. */
struct qgpu_file *qgpu_file_of(struct file *filp);
/* The entry as it is; NULL: there is none. */
struct qgpu_file *qgpu_file_find(struct file *filp);

/* A pod exports so many objects by this file, whose release ends that. False: another pod has exported by it before. */
bool qgpu_file_exports(struct qgpu_file *file, struct qgpu_pod *pod, u32 nr);

/* Around the driver's open: a pod's file is registered before, and forgotten if the driver does not open it. */
struct qgpu_file *qgpu_file_add(struct file *filp, struct qgpu_pod *pod);
void qgpu_file_forget(struct qgpu_file *file);

/* Around the driver's release: gates are opened before, the objects of the file are forgotten after. */
void qgpu_file_close(struct qgpu_file *file);
void qgpu_file_closed(struct qgpu_file *file);

/* Forget every file. No task is in a wrapper any more. */
void qgpu_files_drop(void);

#endif
