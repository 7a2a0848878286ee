/* SPDX-License-Identifier: GPL-2.0 */
#ifndef _QGPU_POWER_H
#define _QGPU_POWER_H

/* Between these, plans are paused before the driver is put to sleep, and go on when it is awake. */
void qgpu_power_start(void);
void qgpu_power_stop(void);

#endif
