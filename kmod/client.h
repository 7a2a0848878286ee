/* SPDX-License-Identifier: GPL-2.0 */
#ifndef _QGPU_CLIENT_H
#define _QGPU_CLIENT_H

#include "object.h"

int qgpu_clients_init(void);
void qgpu_clients_uninit(void);

/* Locked and referenced; NULL: not one of this pod's; ERR_PTR(-EINTR): a fatal signal came first. */
struct qgpu_client *qgpu_client_lock(u32 handle, const struct qgpu_pod *pod);
void qgpu_client_unlock(struct qgpu_client *client);
/* Whether it is still the client known by its handle: one that is dead gives that up to a newer one. */
bool qgpu_client_listed(const struct qgpu_client *client);
/* The id of its pod; 0: nobody's. */
u64 qgpu_client_pod(u32 handle);

/* Room for a client that RM is about to make, so that none is without an entry. NULL: the pod has as many as it may. */
struct qgpu_client *qgpu_client_new(struct qgpu_pod *pod);
void qgpu_client_discard(struct qgpu_client *client);
/*
 * Enter it, or discard it.
 * sure: RM itself said that it made this. Then whatever has the handle here already is gone there, and makes way.
 */
int qgpu_client_add(struct qgpu_client *client, struct list_head *file_clients, u32 handle, bool sure);
/* Of a file that is being released: the first opens every gate of its clients for good, the second forgets them. */
void qgpu_clients_open(struct list_head *file_clients);
void qgpu_clients_remove(struct list_head *file_clients);
/* Locked by the caller, who has removed its objects: forget the client itself. */
void qgpu_client_unlink(struct qgpu_client *client);

/* The memory object of any client, with a reference to the memory, or NULL. */
struct qgpu_mem *qgpu_client_mem(u32 client, u32 handle);

extern atomic_t qgpu_nr_clients;

#endif
