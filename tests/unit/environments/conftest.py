import pytest


@pytest.fixture(autouse=True)
def _workers_can_import_the_doubles(workers_import_the_doubles):
    """The tests of this folder start workers."""
