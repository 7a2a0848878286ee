"""A simulated pGPU: a discrete-event model of TSGs, timeslices and gates in hardware."""
