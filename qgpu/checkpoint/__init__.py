"""Takes pods' processes off their cards by NVIDIA's own checkpoints, and puts them back."""
