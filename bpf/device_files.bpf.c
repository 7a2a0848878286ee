// SPDX-License-Identifier: GPL-2.0-only
/*
 * device_files.bpf.c - an NVIDIA device file that a pod opens belongs to the pod: no other process may use it.
 *
 * A seccomp filter that its processes carry watches a pod's calls. A process without that filter that got a pod's open
 * file would reach the driver unseen. So each file of these devices that a process of a pod opens is recorded with the
 * pod's cgroup, and forgotten when the kernel frees it. A process outside that cgroup and its descendants cannot
 * receive, call or map the file. The guardian may, because it acts for pods; so may the daemon. Files that no pod has
 * opened are not checked: the host's own programs keep theirs.
 *
 * One thing passes between pods: exported memory travels as an open nvidiactl. Another pod may receive that file,
 * because its filter tells the guardian what is imported; it may not call it.
 *
 * User space sets which cgroups are pods and which majors are NVIDIA's (qgpu/lsm/device_files.py). The maps outlive
 * these programs: a change of their layout or meaning needs another VERSION (qgpu/lsm/pins.py). The programs are
 * attached in the order in which they stand here.
 */
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>

#include "kernel.h"

/* As in qgpu/lsm/device_files.py. */
enum kind { POD = 1, GUARDIAN = 2 };
enum counter { SEEN, OPEN, RECEIVE, IOCTL, MMAP, COUNTERS };

#define MAX_FILES	(1 << 18)
#define MAX_OF_A_POD	(1 << 14)
#define FIRST_OF_A_POD	(1 << 9)	/* which other pods' files leave room for: ten programs start with fewer */
#define MAX_LEVELS	32		/* how deep below the root a pod's cgroup may be */
#define NVIDIACTL	(195U << MINOR_BITS | 255)

struct place {
	__u32 kind;
	__s32 files;	/* a pod's files recorded since its cgroup is known, less the freed ones */
};

struct owner {
	__u64 cgroup;
	__u32 level;
	__u32 unused;
};

struct refusal {
	__u64 cgroup;	/* whose file it was */
	__u32 pid;	/* who was refused */
	__u32 counter;
};

struct refused {
	__u64 times;
	char name[16];
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 512);
	__type(key, __u32);
	__type(value, __u32);
} majors SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 8192);
	__type(key, __u64);
	__type(value, struct place);
} cgroups SEC(".maps");

/* Processes that are trusted like the guardian, in any cgroup. */
struct {
	__uint(type, BPF_MAP_TYPE_TASK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, __u32);
} trusted SEC(".maps");

/* By the address of the kernel's struct file; the kernel frees the file after its entry is deleted. */
struct file_map {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, MAX_FILES);
	__type(key, __u64);
	__type(value, struct owner);
};

/*
 * A few pods can fill the first map. The second one has room for the first files of each of MAX_FILES / FIRST_OF_A_POD
 * pods: only a pod that has fewer than FIRST_OF_A_POD files in both maps together gets a place in it.
 */
struct file_map files SEC(".maps");
struct file_map first_files SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, COUNTERS);
	__type(key, __u32);
	__type(value, __u64);
} counters SEC(".maps");

/* The latest refusals, for the log. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 1024);
	__type(key, struct refusal);
	__type(value, struct refused);
} refusals SEC(".maps");

static __always_inline void count(__u32 counter)
{
	__u64 *times = bpf_map_lookup_elem(&counters, &counter);

	if (times)
		__sync_fetch_and_add(times, 1);
}

/* The device number of NVIDIA's device that a file is of; 0 for any other file. */
static __always_inline __u32 device_of(struct file *file)
{
	struct inode *inode = file->f_inode;
	__u32 number, major;

	if (!inode || (inode->i_mode & S_IFMT) != S_IFCHR)
		return 0;
	number = inode->i_rdev;
	major = number >> MINOR_BITS;
	return bpf_map_lookup_elem(&majors, &major) ? number : 0;
}

/* The innermost cgroup of a kind that contains the current task. */
static __always_inline struct place *around_current(__u32 kind, struct owner *owner)
{
	struct place *found = 0;

	for (int level = 0; level < MAX_LEVELS; level++) {
		__u64 cgroup = bpf_get_current_ancestor_cgroup_id(level);
		struct place *place;

		if (!cgroup)
			break;
		place = bpf_map_lookup_elem(&cgroups, &cgroup);
		if (place && place->kind == kind) {
			owner->cgroup = cgroup;
			owner->level = level;
			found = place;
		}
	}
	return found;
}

static __always_inline int is_trusted(void)
{
	struct task_struct *process = bpf_get_current_task_btf()->group_leader;
	struct owner unused;

	return bpf_task_storage_get(&trusted, process, 0, 0) || around_current(GUARDIAN, &unused);
}

static __always_inline struct owner *owner_of(__u64 file)
{
	struct owner *owner = bpf_map_lookup_elem(&first_files, &file);

	return owner ? owner : bpf_map_lookup_elem(&files, &file);
}

static __always_inline int record(__u64 file, struct owner *owner, struct place *pod)
{
	if (pod->files >= MAX_OF_A_POD)
		return -ENFILE;
	if (pod->files < FIRST_OF_A_POD && !bpf_map_update_elem(&first_files, &file, owner, BPF_ANY))
		return 0;
	return bpf_map_update_elem(&files, &file, owner, BPF_ANY);
}

static __always_inline void forget(__u64 file)
{
	struct owner *owner = owner_of(file);
	struct place *pod;
	__u64 cgroup;

	if (!owner)
		return;
	cgroup = owner->cgroup;
	if (bpf_map_delete_elem(&first_files, &file) && bpf_map_delete_elem(&files, &file))
		return;
	pod = bpf_map_lookup_elem(&cgroups, &cgroup);
	if (pod)
		__sync_fetch_and_add(&pod->files, -1);
}

static __always_inline int refuse(__u64 cgroup, __u32 counter, int error)
{
	struct refusal who = { .cgroup = cgroup, .pid = bpf_get_current_pid_tgid() >> 32, .counter = counter };
	struct refused first = {};
	struct refused *before = bpf_map_lookup_elem(&refusals, &who);

	count(counter);
	if (before) {
		__sync_fetch_and_add(&before->times, 1);
		return -error;
	}
	first.times = 1;
	bpf_get_current_comm(first.name, sizeof(first.name));
	bpf_map_update_elem(&refusals, &who, &first, BPF_ANY);
	return -error;
}

static __always_inline int check(struct file *file, __u32 counter)
{
	__u64 key = (__u64)file;
	struct owner *owner, unused;
	__u32 device;

	device = device_of(file);
	if (!device)
		return 0;
	owner = owner_of(key);
	if (!owner || bpf_get_current_ancestor_cgroup_id(owner->level) == owner->cgroup || is_trusted())
		return 0;
	if (counter == RECEIVE && device == NVIDIACTL && around_current(POD, &unused))
		return 0;
	return refuse(owner->cgroup, counter, EPERM);
}

SEC("lsm/file_free_security")
int BPF_PROG(file_free, struct file *file)
{
	forget((__u64)file);
	return 0;
}

SEC("lsm/file_receive")
int BPF_PROG(file_receive, struct file *file, int ret)
{
	return ret ? ret : check(file, RECEIVE);
}

SEC("lsm/file_ioctl")
int BPF_PROG(file_ioctl, struct file *file, unsigned int cmd, unsigned long arg, int ret)
{
	return ret ? ret : check(file, IOCTL);
}

SEC("lsm/file_ioctl_compat")
int BPF_PROG(file_ioctl_compat, struct file *file, unsigned int cmd, unsigned long arg, int ret)
{
	return ret ? ret : check(file, IOCTL);
}

SEC("lsm/mmap_file")
int BPF_PROG(mmap_file, struct file *file, unsigned long reqprot, unsigned long prot, unsigned long flags, int ret)
{
	if (ret || !file)	/* anonymous memory has none */
		return ret;
	return check(file, MMAP);
}

SEC("lsm/file_open")
int BPF_PROG(file_open, struct file *file, int ret)
{
	__u64 key = (__u64)file;
	struct owner owner = {};
	struct place *pod;

	if (ret || !device_of(file))
		return ret;
	count(SEEN);
	forget(key);	/* left by a file whose end was missed */
	pod = around_current(POD, &owner);
	if (!pod)
		return 0;
	if (record(key, &owner, pod))
		return refuse(owner.cgroup, OPEN, ENFILE);
	__sync_fetch_and_add(&pod->files, 1);
	return 0;
}

char LICENSE[] SEC("license") = "GPL";
