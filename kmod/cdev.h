/* SPDX-License-Identifier: GPL-2.0 */
#ifndef _QGPU_CDEV_H
#define _QGPU_CDEV_H

int qgpu_cdev_init(void);
void qgpu_cdev_uninit(void);

#endif
