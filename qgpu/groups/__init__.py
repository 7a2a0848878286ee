"""Share groups: pods that trust each other run side by side under one grant, through NVIDIA's MPS."""
