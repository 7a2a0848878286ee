"""Kubernetes: the DRA driver ``qgpu.io`` and, for older clusters, a device plugin.

Both translate what the kubelet asks for into prepared grants, which qgpud admits, keeps and enforces. They keep no
state of their own. Needs the extra ``k8s``.
"""
