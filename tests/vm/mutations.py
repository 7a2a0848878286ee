"""Small wrong changes of the module's sources, each with what it breaks and the tests that should notice.

tests/kmod/test_mutations.py sees to it that each applies; mutants.py builds them and runs those tests against them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

KMOD = Path(__file__).resolve().parents[2] / "kmod"


@dataclass(frozen=True, slots=True)
class Mutation:
    """``old`` stands exactly once in ``file``; ``new`` takes its place."""

    file: str
    old: str
    new: str
    breaks: str
    #: A file of tests/vm/guest, and pytest's -k for it.
    test: str
    only: str = ""

    def applied(self) -> str:
        """Return the file as it becomes. Raises ValueError where the sources have gone another way."""
        text = (KMOD / self.file).read_text()
        if text.count(self.old) != 1:
            raise ValueError(f"{self.file}: {self.old!r} is there {text.count(self.old)} times")
        return text.replace(self.old, self.new)


def _m(file: str, old: str, new: str, breaks: str, test: str, only: str = "") -> Mutation:
    return Mutation(file, old, new, breaks, f"test_{test}.py", only)


MUTATIONS = (
    # gates: what is due, and what RM's answers mean
    _m(
        "gate.c",
        "\tif (channel->unsure)\n\t\treturn PUT_BACK;\n",
        "",
        "a channel that may be off is taken off twice",
        "slice",
        "moved_in_part or costs_two_calls",
    ),
    _m(
        "gate.c",
        "\t\t\tchannel->unsure = true;\n",
        "",
        "a refused control is thought to have moved nothing",
        "slice",
        "moved_in_part",
    ),
    _m(
        "gate.c",
        "\t\tstep(gpu, OPEN);\n",
        "\t\treturn false;\n",
        "gates are not opened",
        "lease",
        "dead_daemon or hung_daemon",
    ),
    _m(
        "gate.c",
        "#define SILENT_OPEN_NS\t(400 * NSEC_PER_MSEC)",
        "#define SILENT_OPEN_NS\t(10 * NSEC_PER_SEC)",
        "a card that answers again is not asked for ten seconds",
        "letting_go",
        "answers_again",
    ),
    _m(
        "gate.c",
        "#define RETRY_MAX_NS\t(250 * NSEC_PER_MSEC)",
        "#define RETRY_MAX_NS\t(60 * NSEC_PER_SEC)",
        "retries of an opening grow without a bound",
        "faults",
        "retry_of_an_opening",
    ),
    _m(
        "gate.c",
        "#define CLOSING_MAX_NS\t(10 * NSEC_PER_MSEC)",
        "#define CLOSING_MAX_NS\t(100 * NSEC_PER_SEC)",
        "neighbours wait for all closings",
        "edge",
        "neighbours_open",
    ),
    _m(
        "gate.c",
        "#define ABSENT_TIMES\t3",
        "#define ABSENT_TIMES\t1",
        "RM is believed at once that a channel is gone",
        "faults",
        "not_believed_at_once",
    ),
    _m(
        "gate.c",
        "channel->apart = batch->apart + 1;",
        "channel->apart = ALONE;",
        "a pod's bad channel makes every channel cost a control",
        "edge",
        "one_bad_channel",
    ),
    _m(
        "gate.c",
        "\tif (gpu->refused_mixed >= MIXED_MAX)\n\t\tapart = max_t(enum apart, apart, BY_CLIENT);\n",
        "",
        "a driver that refuses batches of clients is asked for them for ever",
        "edge",
        "each_client",
    ),
    _m(
        "gate.c",
        "apart >= BY_CLIENT && first->client != tsg->client",
        "false",
        "batches are never split by client",
        "edge",
        "each_client",
    ),
    _m(
        "gate.c",
        "\t\tchannel->off = batch->action == CLOSE;\n",
        "\t\tchannel->off = true;\n",
        "an opened gate is thought closed",
        "slice",
        "no_plan_is_no_gate",
    ),
    _m(
        "gate.c",
        "\ttsg->set_us = UNSURE_US;\n",
        "",
        "a timeslice that RM set and denied stays",
        "faults",
        "in_spite_of_an_error",
    ),
    _m(
        "gate.c",
        "READ_ONCE(tsg->pod->gone) && !qgpu_tsgs_paused() ? part",
        "READ_ONCE(tsg->pod->gone) ? part",
        "timeslices stay while plans are paused",
        "suspend",
        "",
    ),
    _m(
        "gate.c",
        "all_open &= tsg->absent >= ABSENT_TIMES || !tsg->set_us;",
        "",
        "the driver is let go of with a plan's timeslices",
        "letting_go",
        "slice",
    ),
    _m(
        "gate.c",
        "all_open &= channel->absent >= ABSENT_TIMES || (!channel->off && !channel->unsure);",
        "",
        "the driver is let go of while gates are closed",
        "letting_go",
        "open",
    ),
    # the cards: priority, stalls
    _m("gpu.c", "\tset_fifo(gpu, true);\n\tgpu->gpu_id", "\tgpu->gpu_id", "no priority", "faults", "has_priority"),
    _m(
        "gpu.c",
        "\tif (hangs) {\n\t\tset_fifo(gpu, false);\n",
        "\tif (hangs) {\n",
        "a stalled thread polls with priority",
        "faults",
        "no_priority",
    ),
    _m(
        "gpu.c",
        "|| READ_ONCE(gpu->stalled));",
        "|| false);",
        "the daemon hangs with RM",
        "faults",
        "stalls_no_daemon",
    ),
    _m("gpu.c", "\t\tgpu->silent = true;\n", "", "a lost card is asked again and again", "faults", "lost_card"),
    _m(
        "gpu.c",
        "\t\tWRITE_ONCE(gpu->stalled, false);\n",
        "",
        "a card that answers again counts as stalled",
        "faults",
        "stalls_no_daemon",
    ),
    _m(
        "gpu.c",
        "\tqgpu_event(QGPU_EVENT_STALLED, 0, qgpu_gpu_index(gpu), gpu->stalled);\n",
        "",
        "nobody is told of a stall",
        "faults",
        "stalls_no_daemon",
    ),
    # plans on the clock
    _m(
        "plan_runner.c",
        "\tif (now_ns >= gpu->lease_until_ns) {\n",
        "\tif (false) {\n",
        "a lease does not lapse",
        "lease",
        "hung_daemon",
    ),
    _m(
        "plan_runner.c",
        "\tif (!gpu->pinned)\t/* the caller's open descriptor holds the module until the plan is dropped */\n"
        "\t\t__module_get(THIS_MODULE);\n\tgpu->pinned = true;\n",
        "",
        "the module is unloaded while a gate may be closed",
        "faults",
        "stays_loaded",
    ),
    _m(
        "plan_runner.c",
        "gpu->pinned && !gpu->plan && gpu->all_open",
        "gpu->pinned && !gpu->plan",
        "the module is unloaded while a gate may be closed",
        "faults",
        "stays_loaded",
    ),
    _m(
        "plan_runner.c",
        "\tforget_plan(gpu);\n\treturn true;\n",
        "\treturn true;\n",
        "a plan outlives its daemon",
        "lease",
        "dead_daemon",
    ),
    _m(
        "plan_runner.c",
        "\t\tshare->gated_ns += now_ns - share->closed_since_ns;\n",
        "",
        "the time behind a gate is not counted",
        "slice",
        "no_plan_is_no_gate",
    ),
    _m(
        "plan_runner.c",
        "part->gated && !qgpu_tsgs_paused() && ",
        "!qgpu_tsgs_paused() && ",
        "pods without windows are gated",
        "slice",
        "burst_ratio",
    ),
    _m(
        "plan_runner.c",
        "part->gated && !qgpu_tsgs_paused() && ",
        "part->gated && ",
        "gates stay closed while plans are paused",
        "suspend",
        "",
    ),
    _m(
        "plan_runner.c",
        "gpu->plan && gpu->owner != owner) {\n\t\tmutex_unlock",
        "false) {\n\t\tmutex_unlock",
        "a second daemon replaces the plan",
        "lease",
        "one_owner",
    ),
    # sleep, and leaving
    _m(
        "pause.c",
        "qgpu_runner_wait_open(TELL_AFTER, interruptible)) == -ETIMEDOUT)",
        "0) == -ETIMEDOUT)",
        "the driver is let go of while gates are closed",
        "faults",
        "switching_off_waits",
    ),
    _m(
        "pause.c",
        "\tif (qgpu_runner_wait_open(SLEEP_WAIT, false)) {\n",
        "\tif (false) {\n",
        "the machine sleeps while gates are closed",
        "faults",
        "sleep_is_refused",
    ),
    _m(
        "pause.c",
        "\tcase PM_SUSPEND_PREPARE:\n",
        "",
        "gates stay closed in a suspend",
        "suspend",
        "gates_are_open",
    ),
    _m(
        "power.c",
        "\t\t\tqgpu_rm_sleep(true);\n",
        "\t\t\t;\n",
        "RM is called while the driver sleeps",
        "faults",
        "driver_sleeps",
    ),
    _m(
        "power.c",
        "\tinstruction_pointer_set(regs, (unsigned long)set_power);\n\treturn 1;\n",
        "\tatomic_dec(&inside);\n\treturn 0;\n",
        "the driver's own suspend is not seen",
        "faults",
        "driver_sleeps",
    ),
    _m(
        "interpose.c",
        "\tsynchronize_rcu_tasks();\n\tret = waiting",
        "\tret = waiting",
        "a task on its way in meets a module that is gone",
        "waits",
        "leaving",
    ),
    _m(
        "interpose.c",
        "\tsynchronize_rcu_tasks();\n\treturn 0;\n",
        "\treturn 0;\n",
        "a task on its way out meets a module that is gone",
        "waits",
        "leaving",
    ),
    _m(
        "interpose.c",
        "\tif (!ret)\n\t\tret = wait_for_inside(interruptible);\n",
        "",
        "the module goes while calls are inside",
        "waits",
        "leaving",
    ),
    _m(
        "interpose.c",
        "\tWRITE_ONCE(away, true);\n",
        "",
        "a call through another interposer is judged while the module is off",
        "interpose",
        "another_interposer",
    ),
    # hooks, and what follows from a missing one
    _m(
        "hook.c",
        "\t\tgood &= READ_ONCE(hits) == 1;\n",
        "",
        "probes by breakpoint may be off",
        "guard",
        "while_probes_are_off",
    ),
    _m(
        "hook.c",
        "\t\t.post_handler = hook->redirects ? alone : NULL,\n",
        "",
        "a live patch bypasses a refusal",
        "guard",
        "no_other_module",
    ),
    _m(
        "uvm.c",
        "\tif (ret && charged)\n\t\trecount(filp, current->mm, NULL);\n",
        "",
        "a mapping that UVM refuses stays charged",
        "managed",
        "driver_refuses_costs_nothing",
    ),
    _m(
        "uvm.c",
        "\tif (file && file->mappings && file->mm != current->mm)\n",
        "\tif (false)\n",
        "a child's mapping takes the place of its parent's in the charge",
        "managed",
        "child_that_maps",
    ),
    _m(
        "guard.c",
        "\tif (qgpu_uvm_unbounded())\n",
        "\tif (false)\n",
        "limits are granted while managed memory is not bounded",
        "guard",
        "without_hooks",
    ),
    _m(
        "guard.c",
        "\t\tqgpu_pods_unchecked();\n\tif (missing == told)\n",
        "\t\t;\n\tif (missing == told)\n",
        "a pod whose limit may have been passed is not marked",
        "guard",
        "by_the_module_itself",
    ),
    _m(
        "pod.c",
        "\tif (!safe && brings_limit(share, grant)) {\n",
        "\tif (false) {\n",
        "a limit is granted that cannot be enforced",
        "guard",
        "while_probes_are_off",
    ),
    _m(
        "pod.c",
        "\tpod = find_former(cgroup);\n",
        "\tpod = NULL;\n",
        "files of a cgroup that is a pod again stay unlimited",
        "interpose",
        "added_again",
    ),
    _m(
        "events.c",
        "(by_pod && reader->by_pods == BY_PODS_MAX) || ",
        "",
        "refusals push out all other events",
        "abi",
        "refusals_do_not",
    ),
    # the books
    _m(
        "tsg.c",
        "\t\tchannel->unsure |= channel->off;\n",
        "",
        "a pod starts its channels behind a closed gate",
        "slice",
        "cannot_start",
    ),
    _m(
        "tsg.c",
        ".closed && tsg->hold <= 0 && ",
        ".closed && ",
        "what is freed waits for its gate",
        "slice",
        "nothing_that_goes_away",
    ),
    _m(
        "tsg.c",
        " && !READ_ONCE(tsg->pod->gone);",
        ";",
        "a removed pod stays gated",
        "slice",
        "removed_pod",
    ),
    _m(
        "tsg.c",
        "\t\tasked = qgpu_gpu_ask(tsg->gpu);\n",
        "",
        "a channel that is made behind a closed gate runs",
        "slice",
        "stays_off",
    ),
    _m(
        "pod.h",
        "#define QGPU_POD_CALLS 32",
        "#define QGPU_POD_CALLS 1024",
        "a pod takes every instance of the probes",
        "waits",
        "32_inspected_calls",
    ),
    _m(
        "client.c",
        "if (old && (sure || READ_ONCE(old->dead)))",
        "if (old && sure)",
        "without a seal a handle that RM uses again is refused",
        "waits",
        "given_again",
    ),
    _m(
        "mem.c",
        "share->memory <= limit && more <= limit - share->memory;",
        "share->memory <= limit;",
        "an allocation exceeds the limit",
        "memory",
        "beyond_limit or shares_one_limit",
    ),
    # what a pod may do
    _m(
        "gate_penalty.c",
        "#define TIMES\t20",
        "#define TIMES\t0",
        "opening one's gate over and over is free",
        "hostile_gates",
        "starting_channels or many_threads",
    ),
    _m(
        "control.c",
        " && mode->compute != NV2080_PREEMPTION_MODE_COMPUTE_CILP",
        " && false",
        "a pod's kernels cannot be preempted",
        "hostile_gates",
        "make_its_kernels_last",
    ),
    _m(
        "rules.h",
        "{ 0x83de0318, QGPU_CONTROL_SCHEDULES }",
        "{ 0x83de0318, QGPU_CONTROL_PASS }",
        "a pod puts its channels back by a debugger's control",
        "rules",
        "",
    ),
    _m(
        "rules.h",
        "{ 0x2080110b, QGPU_CONTROL_SCHEDULES }",
        "{ 0x2080110b, QGPU_CONTROL_PASS }",
        "a pod moves gates itself",
        "control",
        "",
    ),
    _m(
        "toctou.c",
        "\t\tmemcpy(seal->data, seal->in, size);\n",
        "",
        "RM acts on a call that was changed after the check",
        "memory",
        "changed_between",
    ),
    _m(
        "cdev.c",
        "\tif (pod || !capable(CAP_SYS_ADMIN))",
        "\tif (!capable(CAP_SYS_ADMIN))",
        "a pod's root changes its own grant",
        "abi",
        "nobody_in_a_pod",
    ),
    _m(
        "plan.c",
        "windows[i].start_ns < at_ns || ",
        "",
        "windows overlap",
        "abi",
        "plans_are_checked",
    ),
    _m(
        "events.c",
        "\t\t\treader->lost++;\n",
        "\t\t\t;\n",
        "lost events are not told",
        "abi",
        "events_are_whole",
    ),
)
