/* SPDX-License-Identifier: GPL-2.0 */
#ifndef _QGPU_CLIENT_H
#define _QGPU_CLIENT_H

#include "object.h"

int qgpu_clients_init(void);
void qgpu_clients_uninit(void);

/* Locked and referenced; NULL: the pod has no such client; ERR_PTR(-EINTR): a fatal signal came first. */
struct qgpu_client *qgpu_client_lock(u32 handle, struct qgpu_pod *pod);
/*
 * The same for a call that makes one object or mapping of a kind. Where that could be too many for the pod, RM is asked
 * before which of those are gone.
 */
struct qgpu_client *qgpu_client_lock_to_make(u32 handle, struct qgpu_pod *pod, enum qgpu_untracked_kind kind);
/* The same for a call that makes or takes at most as many objects, of whatever class. RM duplicates no debuggers. */
struct qgpu_client *qgpu_client_lock_to_take(u32 handle, struct qgpu_pod *pod, u32 most);
/*
 * Lock another client of the pod, which the caller has a reference on, besides a locked one. After an error none is
 * locked. -EINTR: a fatal signal came first; -ESTALE: one of them is dead.
 */
int qgpu_client_lock_also(struct qgpu_client *client, struct qgpu_client *other);
void qgpu_client_unlock(struct qgpu_client *client);
/* With a reference; NULL: the pod has no such client. */
struct qgpu_client *qgpu_client_get(u32 handle, const struct qgpu_pod *pod);
void qgpu_client_put(struct qgpu_client *client);
/* Whether its handle still leads to this client. A dead client gives its handle up to a newer one. */
bool qgpu_client_listed(const struct qgpu_client *client);
/* The id of the client's pod; 0: it belongs to no pod. */
u64 qgpu_client_pod(u32 handle);
/* The pod itself, with a reference, or NULL. */
struct qgpu_pod *qgpu_client_owner(u32 handle);

/*
 * Allocate an entry before RM makes the client, so that no client lacks one. The pod may see the handle before the entry
 * is in the table, so until qgpu_client_made() nobody is told that there is no such client. NULL: the pod is at its
 * maximum; ERR_PTR(-EINTR): a fatal signal came first.
 */
struct qgpu_client *qgpu_client_new(struct qgpu_pod *pod);
/* The entry is in the table, or put. */
void qgpu_client_made(struct qgpu_pod *pod);
/*
 * Enter the client, or put it. sure: RM itself said that it made this client. Then an older entry with the handle
 * is stale, and makes way.
 */
int qgpu_client_add(struct qgpu_client *client, struct list_head *file_clients, u32 handle, bool sure);
/*
 * For a file that is being released: the first opens all gates of its clients for good, and says whether the plan may
 * close one meanwhile; the second forgets the clients. shared, or the second's answer: among them are gates of TSGs on
 * which other clients have handles.
 */
bool qgpu_clients_open(struct list_head *file_clients, bool *shared);
bool qgpu_clients_remove(struct list_head *file_clients);
/* The caller holds the lock and has removed the objects: forget the client itself. */
void qgpu_client_unlink(struct qgpu_client *client);

/* The memory object of any client, with a reference to the memory, or NULL. */
struct qgpu_mem *qgpu_client_mem(u32 client, u32 handle);
/* The stamp of a channel, of memory or of an untracked object of any client; 0: there is no such object. */
u64 qgpu_client_stamp(u32 client, u32 handle);
/* What is charged for the TSG of a channel of any client, with a reference, or NULL. */
struct qgpu_mem *qgpu_client_tsg_mem(u32 client, u32 channel);
/* The TSG that a handle is, with a reference, or NULL. */
struct qgpu_tsg *qgpu_client_tsg(struct qgpu_client *client, u32 handle);

extern atomic_t qgpu_nr_clients;

#endif
