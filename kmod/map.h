/* SPDX-License-Identifier: GPL-2.0 */
#ifndef _QGPU_MAP_H
#define _QGPU_MAP_H

struct qgpu_call;

long qgpu_map_memory(struct qgpu_call *call);
long qgpu_unmap_memory(struct qgpu_call *call);
/* A process has moved a mapping. */
long qgpu_update_mapping(struct qgpu_call *call);
/* For the card. */
long qgpu_map_dma(struct qgpu_call *call);
long qgpu_unmap_dma(struct qgpu_call *call);

#endif
