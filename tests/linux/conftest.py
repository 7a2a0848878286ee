"""A pod behind a real filter, for the tests here that need a descriptor of its."""

from tests.guardian.conftest import free_spaces, pod

__all__ = ["free_spaces", "pod"]
