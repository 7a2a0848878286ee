"""The compute engine of a simulated pGPU: one runlist of TSGs, served in turns.

It decides which TSG is on the engine, and charges time: round robin over the TSGs that can run, each for its timeslice,
with preemption inside a kernel. A TSG without work is skipped at once, a new TSG waits until the running slice ends,
and a TSG alone on the engine pays no switches. Other files decide where work comes from, and when gates move. Time is
what :meth:`Engine.run` is given, in exact integer ns.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from qgpu.planes.sim.hardware import Hardware

#: Endless work, for an open flood.
FOREVER_NS = 1 << 80


@dataclass(slots=True, eq=False)
class Gate:
    """A pod's gate: while it is closed none of the pod's TSGs can run."""

    open: bool = True


@dataclass(slots=True, eq=False)
class Tsg:
    """One time-slice group: its timeslice, its gate, its work and its results."""

    name: str
    gate: Gate
    timeslice_us: int
    #: Called with the time when a launch is finished.
    finished: Callable[[int], None] = lambda _: None
    #: Work left of the launch at the head of the queue, and the launches behind it.
    left_ns: int = 0
    queue: deque[int] = field(default_factory=deque)
    #: Time on the engine, the useful part of it, and the number of switches to it.
    run_ns: int = 0
    useful_ns: int = 0
    starts: int = 0
    #: How many launches are finished.
    launches: int = 0
    #: The longest completed turn since the caller reset this to 0.
    longest_ns: int = 0
    #: Closed while another TSG of its pod has its turn.
    resting: bool = False

    @property
    def open(self) -> bool:
        """Tell whether both its pod's gate and its own are open."""
        return self.gate.open and not self.resting

    @property
    def runnable(self) -> bool:
        """Tell whether the hardware would give it a turn."""
        return self.left_ns > 0 and self.gate.open and not self.resting  # not ``self.open``: this runs too often

    def launch(self, work_ns: int) -> None:
        """Queue work."""
        if self.left_ns:
            self.queue.append(work_ns)
        else:
            self.left_ns = work_ns

    def drop(self) -> None:
        """Drop all work."""
        self.left_ns = 0
        self.queue.clear()


@dataclass(frozen=True, slots=True)
class EngineTimes:
    """Where an engine's time went; the three parts add up to the elapsed time."""

    useful_ns: int = 0
    switching_ns: int = 0
    idle_ns: int = 0


class Engine:
    """One compute engine. At any time it runs a TSG, switches between two, or is idle."""

    def __init__(self, hardware: Hardware, now_ns: int = 0) -> None:
        self.now_ns = now_ns
        self.runlist: list[Tsg] = []
        #: The TSG whose context is on the engine; it stays while no other TSG wants the engine.
        self.resident: Tsg | None = None
        #: Useful work of all TSGs so far, and the time that no TSG is charged for.
        self.useful_ns = 0
        self.idle_ns = 0
        #: Idle time that the context on the engine is charged for.
        self.resident_idle_ns = 0
        self.gap_ns = 0
        self.switches = 0
        #: How often the engine switched from one TSG to another since the caller cleared this.
        self.handovers: Counter[tuple[Tsg, Tsg]] = Counter()
        #: Called with each charged span (TSG, start, end), while recording.
        self.recorder: Callable[[Tsg, int, int], None] | None = None
        self._began_ns = now_ns
        self._hardware = hardware
        self._at = -1  # the resident's place in the runlist, or where the incoming TSG is
        self._incoming: Tsg | None = None
        self._switch_began_ns = 0
        self._slice_began_ns: int | None = None
        self._turn_began_ns = now_ns

    @property
    def times(self) -> EngineTimes:
        """Return where the time went since the engine was made."""
        passed_ns = self.now_ns - self._began_ns
        idle_ns = self.idle_ns + self.resident_idle_ns
        return EngineTimes(self.useful_ns, passed_ns - self.useful_ns - idle_ns, idle_ns)

    def add(self, tsg: Tsg) -> None:
        """Put a TSG at the end of the runlist."""
        self.runlist.append(tsg)

    def remove(self, tsg: Tsg) -> None:
        """Take a TSG off the runlist and drop its work."""
        at = self.runlist.index(tsg)
        del self.runlist[at]
        if at <= self._at:
            self._at -= 1
        if self.resident is tsg:  # it may go on with work on another engine
            self.resident = None
        tsg.drop()

    def run(self, until_ns: int) -> None:
        """Run until ``until_ns``, or until a launch is finished; its callback may change what follows."""
        while self.now_ns < until_ns:
            if self._incoming is not None:
                self._go_on_switching(until_ns)
            elif self.resident is not None and self.resident.runnable:
                if self._go_on_running(self.resident, until_ns):
                    return
            elif (incoming := self._next()) is not None:
                self._begin_switch(incoming)
            else:
                self._slice_began_ns = None
                self._idle(until_ns)

    def drop_closed_context(self) -> None:
        """Remove a context from the engine whose gate has closed."""
        if self._incoming is None and self.resident is not None and not self.resident.open:
            self.resident = None

    def _idle(self, until_ns: int) -> None:
        """Let time pass in which no TSG runs.

        As on hardware, the context that stays on the engine is charged while gates keep others off it. While no other
        TSG has work, that makes no difference, and only work is charged.
        """
        here, passed_ns = self.resident, until_ns - self.now_ns
        kept_off = any(other.left_ns and not other.open for other in self.runlist)
        if here is not None and kept_off and here.open and here in self.runlist:
            here.run_ns += passed_ns
            self.resident_idle_ns += passed_ns
            if self.recorder is not None:
                self.recorder(here, self.now_ns, until_ns)
        else:
            self.idle_ns += passed_ns
        self.now_ns = until_ns

    def _next(self) -> Tsg | None:
        """Return the next runnable TSG in the runlist after the current place, and move there."""
        count = len(self.runlist)
        for step in range(1, count + 1):
            at = (self._at + step) % count
            if self.runlist[at].runnable and self.runlist[at] is not self.resident:
                self._at = at
                return self.runlist[at]
        return None

    def _begin_switch(self, incoming: Tsg) -> None:
        if self.resident is not None:
            turn_ns = self.now_ns - self._turn_began_ns + self._hardware.save_ns + self._hardware.restore_ns
            self.resident.longest_ns = max(self.resident.longest_ns, turn_ns)
        self._incoming = incoming
        self._switch_began_ns = self.now_ns
        self.switches += 1

    def _go_on_switching(self, until_ns: int) -> None:
        """Charge the outgoing context for saving and the incoming one for restoring; the gap is charged to none."""
        incoming, cost = self._incoming, self._hardware
        assert incoming is not None
        done = self.now_ns - self._switch_began_ns
        upto = min(until_ns - self._switch_began_ns, cost.switch_ns)
        saving = min(upto, cost.save_ns) - min(done, cost.save_ns)
        restoring = max(upto, cost.save_ns + cost.gap_ns) - max(done, cost.save_ns + cost.gap_ns)
        if self.resident is None:
            self.gap_ns += saving
        else:
            self.resident.run_ns += saving
        self.gap_ns += upto - done - saving - restoring
        incoming.run_ns += restoring
        if self.recorder is not None:
            if self.resident is not None:
                self.recorder(self.resident, self.now_ns, self.now_ns + saving)
            self.recorder(incoming, self._switch_began_ns + upto - restoring, self._switch_began_ns + upto)
        self.now_ns = self._switch_began_ns + upto
        if upto == cost.switch_ns:
            incoming.starts += 1
            if self.resident is not None:
                self.handovers[self.resident, incoming] += 1
            self.resident, self._incoming = incoming if incoming in self.runlist else None, None
            self._slice_began_ns = self._turn_began_ns = self.now_ns

    def _go_on_running(self, tsg: Tsg, until_ns: int) -> bool:
        """Run ``tsg`` to the end of its launch, its slice or the time; tell whether a launch is finished."""
        if self._slice_began_ns is None:
            self._slice_began_ns = self.now_ns
        end_ns = until_ns
        if any(other.runnable and other is not tsg for other in self.runlist):
            if self._slice_began_ns == self.now_ns and self.recorder is None:
                self._skip_rounds(until_ns)
            slice_end_ns = self._slice_end(tsg)
            if slice_end_ns <= self.now_ns:
                incoming = self._next()
                assert incoming is not None
                self._begin_switch(incoming)
                return False
            end_ns = min(end_ns, slice_end_ns)
        worked_ns = min(end_ns - self.now_ns, tsg.left_ns)
        tsg.run_ns += worked_ns
        tsg.useful_ns += worked_ns
        self.useful_ns += worked_ns
        tsg.left_ns -= worked_ns
        if self.recorder is not None:
            self.recorder(tsg, self.now_ns, self.now_ns + worked_ns)
        self.now_ns += worked_ns
        if tsg.left_ns:
            return False
        tsg.launches += 1
        if tsg.queue:
            tsg.left_ns = tsg.queue.popleft()
        tsg.finished(self.now_ns)
        return True

    def _slice_end(self, tsg: Tsg) -> int:
        """Return when the running slice ends. A TSG that was alone has had slices one after the other."""
        began_ns = self._slice_began_ns
        assert began_ns is not None
        turn_ns = self._hardware.turn_ns(tsg.timeslice_us)
        if turn_ns == 0:
            return self.now_ns
        return began_ns + max(1, -(-(self.now_ns - began_ns) // turn_ns)) * turn_ns

    def _skip_rounds(self, until_ns: int) -> None:
        """Advance as many whole rounds of the runlist at once as nothing can interrupt.

        Until a launch ends, or an outside event comes (not before ``until_ns``), the same TSGs can run. Every round is
        then like the first, and arithmetic replaces events.
        """
        cost = self._hardware
        turns = [(tsg, cost.turn_ns(tsg.timeslice_us)) for tsg in self.runlist if tsg.runnable]
        round_ns = sum(turn_ns + cost.switch_ns for _, turn_ns in turns)
        rounds = (until_ns - self.now_ns) // round_ns
        if not rounds:
            return
        rounds = min([rounds, *((tsg.left_ns - 1) // turn_ns for tsg, turn_ns in turns if turn_ns)])
        if not rounds:
            return
        for at, (tsg, turn_ns) in enumerate(turns):
            tsg.left_ns -= rounds * turn_ns
            tsg.useful_ns += rounds * turn_ns
            self.useful_ns += rounds * turn_ns
            tsg.run_ns += rounds * (turn_ns + cost.save_ns + cost.restore_ns)
            tsg.starts += rounds
            tsg.longest_ns = max(tsg.longest_ns, turn_ns + cost.save_ns + cost.restore_ns)
            self.handovers[tsg, turns[(at + 1) % len(turns)][0]] += rounds
        self.gap_ns += rounds * len(turns) * cost.gap_ns
        self.switches += rounds * len(turns)
        self.now_ns += rounds * round_ns
        self._slice_began_ns = self._turn_began_ns = self.now_ns
