/* SPDX-License-Identifier: GPL-2.0 */
#ifndef _QGPU_PROBE_WATCH_H
#define _QGPU_PROBE_WATCH_H

#include <linux/types.h>

/* Under qgpu_attach_lock: place all probes and watch them; remove them. When stop returns, no task is in a handler. */
void qgpu_probe_watch_start(void);
void qgpu_probe_watch_stop(void);

/* Try the probes now. Returns what is missing (QGPU_MISSING_*); 0: limits hold. Sleeps. */
u32 qgpu_probe_watch_check(void);

#endif
