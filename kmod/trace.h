/* SPDX-License-Identifier: GPL-2.0 */
/* trace.h - tracepoints for operators: gates moved, plans installed and lapsed, calls refused. */
#undef TRACE_SYSTEM
#define TRACE_SYSTEM qgpu

#if !defined(_QGPU_TRACE_H) || defined(TRACE_HEADER_MULTI_READ)
#define _QGPU_TRACE_H

#include <linux/tracepoint.h>

TRACE_EVENT(qgpu_gate,
	TP_PROTO(int gpu, u64 pod, u32 channels, bool off),
	TP_ARGS(gpu, pod, channels, off),
	TP_STRUCT__entry(
		__field(int, gpu)
		__field(u64, pod)
		__field(u32, channels)
		__field(bool, off)
	),
	TP_fast_assign(
		__entry->gpu = gpu;
		__entry->pod = pod;
		__entry->channels = channels;
		__entry->off = off;
	),
	TP_printk("gpu=%d pod=%llu channels=%u %s", __entry->gpu, __entry->pod, __entry->channels,
		  __entry->off ? "off" : "on")
);

TRACE_EVENT(qgpu_plan,
	TP_PROTO(int gpu, u32 pods, u64 period_ns),
	TP_ARGS(gpu, pods, period_ns),
	TP_STRUCT__entry(
		__field(int, gpu)
		__field(u32, pods)
		__field(u64, period_ns)
	),
	TP_fast_assign(
		__entry->gpu = gpu;
		__entry->pods = pods;
		__entry->period_ns = period_ns;
	),
	TP_printk("gpu=%d pods=%u period_ns=%llu", __entry->gpu, __entry->pods, __entry->period_ns)
);

TRACE_EVENT(qgpu_lapse,
	TP_PROTO(int gpu, u64 late_ns),
	TP_ARGS(gpu, late_ns),
	TP_STRUCT__entry(
		__field(int, gpu)
		__field(u64, late_ns)
	),
	TP_fast_assign(
		__entry->gpu = gpu;
		__entry->late_ns = late_ns;
	),
	TP_printk("gpu=%d late_ns=%llu", __entry->gpu, __entry->late_ns)
);

TRACE_EVENT(qgpu_refuse,
	TP_PROTO(u64 pod, u32 nr, u32 what, u32 status),
	TP_ARGS(pod, nr, what, status),
	TP_STRUCT__entry(
		__field(u64, pod)
		__field(u32, nr)
		__field(u32, what)
		__field(u32, status)
	),
	TP_fast_assign(
		__entry->pod = pod;
		__entry->nr = nr;
		__entry->what = what;
		__entry->status = status;
	),
	TP_printk("pod=%llu nr=%#x what=%#x status=%#x", __entry->pod, __entry->nr, __entry->what, __entry->status)
);

#endif

#undef TRACE_INCLUDE_PATH
#define TRACE_INCLUDE_PATH .
#undef TRACE_INCLUDE_FILE
#define TRACE_INCLUDE_FILE trace
#include <trace/define_trace.h>
