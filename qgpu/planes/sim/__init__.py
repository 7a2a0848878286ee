"""A simulated pGPU: what the hardware does with TSGs, timeslices and gates, as a discrete-event model."""
