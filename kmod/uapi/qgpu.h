/* SPDX-License-Identifier: GPL-2.0 WITH Linux-syscall-note */
/*
 * /dev/qgpu: how user space tells qgpu.ko who the pods are, what they were granted and whose turn it is.
 *
 * Rules of this file. They are checked by tests/planes/kmod/test_uapi.py and by the module:
 *
 *  - It is read by gcc and by cffi. So it holds only structs, "#define NAME NUMBER" and
 *    "#define NAME _IO*('Q', number, struct name)", each on one line.
 *  - Fixed-width members, naturally aligned, every pad spelled out. Pointers travel as __u64.
 *  - Pads and unknown flags must be zero, or the call is refused with EINVAL and changes nothing.
 *    An unknown command is ENOTTY.
 *  - New members go at the end of a struct, where zero means the old behaviour, and raise QGPU_ABI_VERSION. The size in
 *    a command is the caller's: the module reads as 0 what the caller does not have, and gives the caller what fits.
 *    What the module does not have must be 0, or the call is refused with E2BIG, and is answered as 0. QGPU_IOC_INFO
 *    begins with the version, so any caller can ask for it.
 *  - Ids are never reused while the module is loaded.
 *  - Time is nanoseconds on CLOCK_MONOTONIC. Microseconds appear only where the number is RM's (timeslice_us).
 *  - What a descriptor installed (plans) ends with the descriptor. What describes the host (pods and their
 *    grants) stays until it is removed, so that a restarted daemon finds it again.
 */
#ifndef _UAPI_QGPU_H
#define _UAPI_QGPU_H

#include <linux/ioctl.h>
#include <linux/types.h>

#define QGPU_ABI_VERSION 5

#define QGPU_NAME_LEN 64
#define QGPU_MAX_GPUS 32
#define QGPU_MAX_PODS 256
#define QGPU_MAX_WINDOWS 1024

#define QGPU_MIN_TIMESLICE_US 50
#define QGPU_MAX_TIMESLICE_US 1000000
#define QGPU_MIN_PERIOD_NS 10000000
#define QGPU_MAX_PERIOD_NS 10000000000
#define QGPU_MIN_LEASE_NS 10000000
#define QGPU_MAX_LEASE_NS 60000000000

/*
 * QGPU_IOC_INFO: what the module is able to do now.
 * state: see QGPU_STATE_*. driver is RM's own version string, empty without a driver. stalled is a mask of pGPUs: there
 * RM does not answer, or says that the card does not, or a gate that should be open does not open.
 */
#define QGPU_STATE_NO_DRIVER 0
#define QGPU_STATE_ENFORCING 1
#define QGPU_STATE_UNKNOWN_DRIVER 2
#define QGPU_STATE_NO_RM_INTERFACE 3
#define QGPU_STATE_OFF 4

/* Each RM call's kernel copy is compared with what was admitted, so a racing thread gains nothing. */
#define QGPU_INFO_SEALED 0x1
/* UVM is loaded, and managed memory counts against the memory limit by its address space. */
#define QGPU_INFO_MANAGED 0x2
/* Memory that UVM holds after its handle is gone stays charged. */
#define QGPU_INFO_HELD 0x4
/* Share groups: a TSG may have further handles in clients of its pod, and a pod further cgroups. */
#define QGPU_INFO_GROUPS 0x8

/*
 * What limits need and the module lacks, tried at each call. While anything is missing a grant with a limit is refused
 * with EOPNOTSUPP. PROBES: the kernel's probes do not fire (debugfs' kprobes/enabled, kernel.ftrace_enabled), or cannot
 * redirect a call. SEAL, HELD, MANAGED: the probes behind the flag of that name do not work; MANAGED only if UVM is
 * loaded.
 */
#define QGPU_MISSING_PROBES 0x1
#define QGPU_MISSING_SEAL 0x2
#define QGPU_MISSING_HELD 0x4
#define QGPU_MISSING_MANAGED 0x8

struct qgpu_info {
	__u32 abi;
	__u32 state;
	__u32 nr_gpus;
	__u32 nr_pods;
	__u32 flags;
	__u32 nr_clients;
	__u32 nr_objects;
	__u32 stalled;
	__u64 calls;
	char driver[QGPU_NAME_LEN];
	__u32 missing;
	__u32 pad_missing;
};

/* QGPU_IOC_GPU: one pGPU, by index (in). memory is 0 until a pod has opened the card. */
struct qgpu_gpu_info {
	__u32 gpu;
	__u32 gpu_id;
	__u32 domain;
	__u32 bus;
	__u32 slot;
	__u32 function;
	__u64 memory;
};

/*
 * QGPU_IOC_POD_ADD: make the processes of a cgroup (v2) and of its descendants a pod. name ends with a zero byte, and
 * all bytes behind that are zero too. The answer is pod. Files of the driver that are open from a time when the same
 * cgroup was a pod before belong to the new one, with all that was allocated on them, meanwhile too.
 */
struct qgpu_pod_add {
	__s32 cgroup_fd;
	__u32 flags;
	char name[QGPU_NAME_LEN];
	__u64 pod;
};

/* QGPU_IOC_POD_REMOVE: the pod ends; its processes run on without gates and limits. */
struct qgpu_pod_remove {
	__u64 pod;
	__u32 flags;
	__u32 pad;
};

/*
 * QGPU_IOC_POD_JOIN: the processes of one more cgroup (v2; cgroup_fd) and of its descendants are the pod's too. EEXIST:
 * the cgroup is a pod's already. QGPU_IOC_POD_LEAVE: no longer, for processes that open a file of the driver from now on;
 * ENOENT: it was not. QGPU_IOC_POD_JOINED_NEXT: the pod's joined cgroup with the lowest id above cgroup (in, then out);
 * ENOENT at the end. A pod's end ends them all. There are at most QGPU_MAX_JOINED, of all pods. Members that the call
 * does not use must be 0.
 */
#define QGPU_MAX_JOINED 256

struct qgpu_pod_cgroup {
	__u64 pod;
	__u64 cgroup;
	__s32 cgroup_fd;
	__u32 flags;
};

#define QGPU_CLASS_OFFLINE 0
#define QGPU_CLASS_ONLINE 1

/*
 * QGPU_IOC_GRANT_SET, QGPU_IOC_GRANT_GET: the grant of a pod on one pGPU. memory (bytes; 0 is no limit) is enforced by
 * the module. A limit (memory or cores) that the pod does not have yet is refused with EOPNOTSUPP while something is
 * missing for it (struct qgpu_info). pod_class, cores (per cent; 0 is no quota) and latency_target_ns (0 is none) are only stored, because
 * they act through plans. GET answers ENOENT if nothing was set.
 */
struct qgpu_grant {
	__u64 pod;
	__u32 gpu;
	__u32 pod_class;
	__u32 cores;
	__u32 flags;
	__u64 memory;
	__u64 latency_target_ns;
};

/* A file of the NVIDIA driver was open in the pod before the module could see it; such work has no gate. */
#define QGPU_POD_LATE 0x1
/* Another thread changed a call between check and use. */
#define QGPU_POD_TAMPERED 0x2
/* While the pod had a limit, something was missing (QGPU_MISSING_*) or a call passed unseen: it may hold more. */
#define QGPU_POD_UNCHECKED 0x4

/*
 * QGPU_IOC_POD_NEXT: the pod with the lowest id above pod (in, then out); ENOENT at the end. refused_objects counts
 * objects beyond those that a client or pod may have of classes without a charge, and UVM's mappings beyond a pod's most.
 */
struct qgpu_pod_next {
	__u64 pod;
	__u64 cgroup;
	char name[QGPU_NAME_LEN];
	__u32 flags;
	__u32 nr_files;
	__u32 nr_clients;
	__u32 pad;
	__u64 refused_allocs;
	__u64 refused_controls;
	__u64 refused_objects;
};

/* QGPU_IOC_USAGE: a pod on a pGPU (in). gated_ns only grows. */
struct qgpu_usage {
	__u64 pod;
	__u32 gpu;
	__u32 nr_tsgs;
	__u32 nr_channels;
	__u32 gate_closed;
	__u64 memory;
	__u64 peak_memory;
	__u64 gated_ns;
	__u64 now_ns;
};

#define QGPU_ENGINE_COMPUTE 0x1
/* It has further handles: QGPU_IOC_HANDLE_NEXT. */
#define QGPU_TSG_SHARED 0x2

/*
 * QGPU_IOC_TSG_NEXT: the TSG of a pod on a pGPU with the lowest id above id (in, then out); ENOENT at the end. client
 * and handle are RM's names for it, tgid is the kernel's name of the client's maker; if the TSG has several handles, of
 * the oldest. timeslice_us is 0 while the driver's own timeslice is in force.
 */
struct qgpu_tsg_next {
	__u64 pod;
	__u64 id;
	__u32 gpu;
	__u32 client;
	__u32 handle;
	__u32 tgid;
	__u32 nr_channels;
	__u32 flags;
	__u64 timeslice_us;
};

/*
 * QGPU_IOC_HANDLE_NEXT: the handle of a TSG (its id) with the lowest stamp above stamp (in, then out); ENOENT at the
 * end. The oldest has the lowest. Clients of an MPS server have a handle each on the server's TSG.
 */
struct qgpu_handle_next {
	__u64 tsg;
	__u64 stamp;
	__u32 gpu;
	__u32 client;
	__u32 handle;
	__u32 tgid;
};

/* What happens to the rest of a window when its pod is idle: with YIELD it goes to the pods that yield too. */
#define QGPU_WINDOW_YIELD 0x1

struct qgpu_window {
	__u64 start_ns;
	__u64 end_ns;
	__u32 flags;
	__u32 pad;
};

/* With GATED the gate of the pod is open in its windows only (never, if it has none); without, always. */
#define QGPU_POD_PLAN_GATED 0x1
/* With COPIES (and GATED) the gate covers copy TSGs too; without, it leaves them on the card. */
#define QGPU_POD_PLAN_COPIES 0x2

/*
 * timeslice_us is set on each TSG of the pod but copy TSGs, copy_timeslice_us on these; 0 leaves them the driver's own.
 * Copy TSGs are those of copy engines that are not on the compute engine's runlist. Where the module is not certain of
 * that, a TSG is none.
 */
struct qgpu_pod_plan {
	__u64 pod;
	__u64 timeslice_us;
	__u32 pod_class;
	__u32 flags;
	__u32 first_window;
	__u32 nr_windows;
	__u64 copy_timeslice_us;
};

/*
 * QGPU_IOC_PLAN: what is to happen on one pGPU, period after period. The plan ends when another plan replaces it, when
 * lease_ns have passed without QGPU_IOC_RENEW, or when this descriptor is closed. Without a plan every gate is open and
 * every timeslice is the driver's own.
 *
 * pods and windows point to arrays of qgpu_pod_plan and qgpu_window. The windows of a pod are those from first_window
 * on, in order, without overlap, within the period. The period starts where CLOCK_MONOTONIC divides by it. A pod that
 * was removed is skipped; an id that never was is EINVAL. Another descriptor's plan on this pGPU is EBUSY. A refused
 * plan leaves the old one in force.
 *
 * pod_plan_size is the size of the caller's qgpu_pod_plan, which counts as the one in a command does. 0: it ends before
 * copy_timeslice_us, and copy TSGs have the timeslice and the gate of all others.
 */
#define QGPU_MAX_POD_PLAN_SIZE 256

struct qgpu_plan {
	__u32 gpu;
	__u32 flags;
	__u64 period_ns;
	__u64 lease_ns;
	__u32 nr_pods;
	__u32 nr_windows;
	__u64 pods;
	__u64 windows;
	__u32 pod_plan_size;
	__u32 pad;
};

/* QGPU_IOC_RENEW: the plan on gpu holds for another lease; ENOENT if it has lapsed. */
struct qgpu_renew {
	__u32 gpu;
	__u32 flags;
};

/* QGPU_IOC_IDLE: the owner of the plan on gpu says that a pod has nothing to run (idle 1), or has work again (0). */
struct qgpu_idle {
	__u64 pod;
	__u32 gpu;
	__u32 idle;
};

#define QGPU_EVENT_TSG_NEW 1
#define QGPU_EVENT_TSG_GONE 2
#define QGPU_EVENT_POD_CHANGED 3
#define QGPU_EVENT_MEMORY_REFUSED 4
#define QGPU_EVENT_CONTROL_REFUSED 5
#define QGPU_EVENT_LEASE_LAPSED 6
#define QGPU_EVENT_LATE_FILE 7
#define QGPU_EVENT_TAMPERED 8
#define QGPU_EVENT_GATE_FAILED 9
#define QGPU_EVENT_STATE 10
/* value 1: the pGPU has stalled (see QGPU_IOC_INFO); 0: it no longer does. */
#define QGPU_EVENT_STALLED 12
/*
 * The reader was too slow, or pods caused too many events of their own (TSGs, refusals): value says how many events are
 * missing here.
 */
#define QGPU_EVENT_LOST 11
/* value: what limits lack now (QGPU_MISSING_*); 0: nothing any more. */
#define QGPU_EVENT_MISSING 13

/* read() returns whole events, oldest first; poll() says when there are any. Unused members are zero. */
struct qgpu_event {
	__u64 time_ns;
	__u64 pod;
	__u64 value;
	__u32 type;
	__u32 gpu;
};

#define QGPU_IOC_INFO _IOR('Q', 1, struct qgpu_info)
#define QGPU_IOC_GPU _IOWR('Q', 2, struct qgpu_gpu_info)
#define QGPU_IOC_POD_ADD _IOWR('Q', 3, struct qgpu_pod_add)
#define QGPU_IOC_POD_REMOVE _IOW('Q', 4, struct qgpu_pod_remove)
#define QGPU_IOC_POD_NEXT _IOWR('Q', 5, struct qgpu_pod_next)
#define QGPU_IOC_GRANT_SET _IOW('Q', 6, struct qgpu_grant)
#define QGPU_IOC_GRANT_GET _IOWR('Q', 7, struct qgpu_grant)
#define QGPU_IOC_USAGE _IOWR('Q', 8, struct qgpu_usage)
#define QGPU_IOC_TSG_NEXT _IOWR('Q', 9, struct qgpu_tsg_next)
#define QGPU_IOC_PLAN _IOW('Q', 10, struct qgpu_plan)
#define QGPU_IOC_RENEW _IOW('Q', 11, struct qgpu_renew)
#define QGPU_IOC_IDLE _IOW('Q', 12, struct qgpu_idle)
#define QGPU_IOC_HANDLE_NEXT _IOWR('Q', 13, struct qgpu_handle_next)
#define QGPU_IOC_POD_JOIN _IOW('Q', 14, struct qgpu_pod_cgroup)
#define QGPU_IOC_POD_LEAVE _IOW('Q', 15, struct qgpu_pod_cgroup)
#define QGPU_IOC_POD_JOINED_NEXT _IOWR('Q', 16, struct qgpu_pod_cgroup)

#endif /* _UAPI_QGPU_H */
