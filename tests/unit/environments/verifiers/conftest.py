import pytest
from tests.doubles.inference import running_inference


@pytest.fixture
def inference(tmp_path, free_port):
    with running_inference(tmp_path / "model", free_port) as (double, _):
        yield double
