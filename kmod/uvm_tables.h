/* SPDX-License-Identifier: GPL-2.0 */
#ifndef _QGPU_UVM_TABLES_H
#define _QGPU_UVM_TABLES_H

#include <linux/types.h>

struct qgpu_pod;

/* The page tables of one of UVM's files. None of these sleeps. */
struct qgpu_tables;

/* The most that a mapping may take of a card, in bytes: without neighbours, and with the smallest pages. */
u64 qgpu_table_bytes(u64 base, u64 length);

/* NULL: no memory. */
struct qgpu_tables *qgpu_tables_new(struct qgpu_pod *pod);
struct qgpu_tables *qgpu_tables_get(struct qgpu_tables *tables);
void qgpu_tables_put(struct qgpu_tables *tables);

/* Whether nothing is charged for them. */
bool qgpu_tables_empty(const struct qgpu_tables *tables);
/* -EDQUOT: the pod has no room. */
int qgpu_tables_add(struct qgpu_tables *tables, u64 size);
void qgpu_tables_sub(struct qgpu_tables *tables, u64 size);

#endif
