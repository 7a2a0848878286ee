/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * kernel.h - the few members of the kernel's structs that the programs read. libbpf relocates them to the running
 * kernel by its BTF (CO-RE), so each struct declares only what is used.
 */
#ifndef QGPU_BPF_KERNEL_H
#define QGPU_BPF_KERNEL_H

#include <linux/types.h>

#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)

struct inode {
	unsigned short i_mode;
	unsigned int i_rdev;
};

struct file {
	struct inode *f_inode;
};

struct task_struct {
	struct task_struct *group_leader;
};

#pragma clang attribute pop

/* linux/stat.h, linux/kdev_t.h */
#define S_IFMT		0170000
#define S_IFCHR		0020000
#define MINOR_BITS	20
#define MINOR_MASK	((1U << MINOR_BITS) - 1)

/* asm-generic/errno-base.h */
#define EPERM		1
#define ENFILE		23

#endif
